"""Flat ranges as boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsq_ckpt.core.flat_ranges import flat_index, is_contiguous, split_range


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(0, math.prod(shape) - start))


@given(ranges())
def test_boxes_are_the_range(drawn):
    shape, start, length = drawn
    array = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(split_range(shape, start, length))
    elements = []
    for box in boxes:
        part = array[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.shape, strict=True))]
        assert part.shape == box.shape and part.size == box.elements
        assert part.reshape(-1)[0] == box.start == flat_index(shape, box.offsets)
        assert is_contiguous(shape, box.shape)
        elements += part.reshape(-1).tolist()
    assert elements == list(range(start, start + length))
    assert len(boxes) <= 2 * max(len(shape), 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4))
def test_contiguous_is_what_numpy_says(sizes):
    shape = tuple(max(pair) for pair in sizes)
    box = tuple(min(pair) for pair in sizes)
    array = np.arange(math.prod(shape)).reshape(shape)
    part = array[tuple(slice(0, size) for size in box)].reshape(-1)
    assert is_contiguous(shape, box) == bool((np.diff(part) == 1).all())


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 13), (11, 2), (3, -1)])
def test_ranges_outside_are_refused(start, length):
    with pytest.raises(ValueError, match="of a tensor of 12"):
        list(split_range((3, 4), start, length))
