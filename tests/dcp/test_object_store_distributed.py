"""Several ranks and a server of S3: what the worker checks is written in its docstrings."""

from __future__ import annotations

import pytest

from tests.helpers.processes import torchrun


@pytest.mark.slow(34)
def test_ranks_save_to_one_bucket_and_others_load_it(bucket):
    assert torchrun("object_store", 2, f"{bucket}/run", "save").count("ok ") == 4
    for ranks in (1, 3):
        assert torchrun("object_store", ranks, f"{bucket}/run", "load").count("ok ") == 2
