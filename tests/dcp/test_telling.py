"""Warnings of what a checkpoint has more than the state dict that it is loaded into."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from tests.api.test_buffers import EXTRA, Remembering

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def said(path, state, through_dcp) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if through_dcp:
            dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(path), no_dist=True)
        else:
            dsq_ckpt.load(state, path)
    return [str(one.message) for one in caught if "was saved of an extra state" in str(one.message)]


@pytest.mark.parametrize("through_dcp", [False, True])
def test_an_extra_state_that_has_grown_since_a_state_dict_was_made_is_told(tmp_path, through_dcp):
    """A state dict is loaded by its names, so the rest of an extra state would be lost, also of a plain dict."""
    given, before = EXTRA["grown"][0], {"counts": {"<unk>": 0}}
    dsq_ckpt.save({"model": Remembering(given)}, tmp_path / "a", config="exact")
    for kind in (dict, lambda state: state):
        found = said(tmp_path / "a", {"model": kind(Remembering(copy.deepcopy(before)).state_dict())}, through_dcp)
        assert len(found) == 1
        assert "'model._extra_state.counts.the', 'model._extra_state.amax' was saved of an extra state" in found[0]
    same = {"counts": {"<unk>": 0, "the": 0}, "amax": torch.zeros(4)}
    assert said(tmp_path / "a", {"model": Remembering(same).state_dict()}, through_dcp) == []
    if not through_dcp:
        assert said(tmp_path / "a", {"model": Remembering(before)}, through_dcp) == []
