"""Which chunks cover a tensor, and which do not."""

from __future__ import annotations

import pytest

from dsq_ckpt.storage.index import find_coverage_error


@pytest.mark.parametrize("shape, boxes, expected", [
    ([], [([], [])], None),
    ([], [], "1 of 1"),
    ([3, 0], [], None),
    ([4, 6], [([0, 0], [2, 6]), ([2, 0], [2, 3]), ([2, 3], [2, 3])], None),
    ([4, 6], [([0, 0], [2, 6]), ([2, 0], [2, 3]), ([2, 2], [2, 3])], "overlap"),
    ([4, 6], [([0, 0], [2, 6]), ([0, 0], [2, 6])], "overlap"),
    ([4, 6], [([0, 0], [4, 6]), ([4, 0], [0, 6])], None),
    ([4, 6], [([0, 0], [4, 6]), ([0, 0], [1, 1])], "1 too many"),
    ([4], [([2], [2])], "2 of 4"),
    # a pinwheel: no cut goes through
    ([3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])], None),
    ([1] * 9, [([0] * 9, [1] * 9)], None),
])
def test_chunks_that_cover_a_tensor(shape, boxes, expected):
    problem = find_coverage_error(shape, boxes)
    assert problem is None if expected is None else expected in problem


def test_coverage_of_many_chunks():
    """Linear in the number of chunks."""
    side = 200
    boxes = [([x * 3, y * 5], [3, 5]) for x in range(side) for y in range(side)]
    assert find_coverage_error([3 * side, 5 * side], boxes) is None
    boxes[777] = ([0, 0], [3, 5])
    assert "overlap" in find_coverage_error([3 * side, 5 * side], boxes)
