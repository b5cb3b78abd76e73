"""Counts of pairs against `np.add.at`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsq_ckpt.coding.pairs import count_pairs


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 3, 4, 5, 1000, 70_001]), st.sampled_from([1, 2, 33, 256]),
    st.sampled_from([1, 2, 5, 256]),
)
def test_counts_are_those_of_numpy(seed, n, rows, columns):
    rng = np.random.default_rng(seed)
    contexts, symbols = (rng.integers(0, most, n).astype(np.uint8) for most in (rows, columns))
    expected = np.zeros((256, 256), np.int64)
    np.add.at(expected, (contexts, symbols), 1)
    assert np.array_equal(count_pairs(contexts, symbols), expected)


def test_both_have_as_many():
    with pytest.raises(ValueError, match="as many of both"):
        count_pairs(np.zeros(4, np.uint8), np.zeros(5, np.uint8))
