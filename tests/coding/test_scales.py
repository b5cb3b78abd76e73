"""Numbers of rows and columns as the items of a pack."""

from __future__ import annotations

import numpy as np
import pytest

from dsq_ckpt.coding.scales import pack_scales, unpack_scales
from dsq_ckpt.errors import CodingError


def test_numbers_come_back():
    numbers = np.arange(-(1 << 14), 1 << 14, dtype=np.int16)
    items = pack_scales(numbers)
    assert np.array_equal(np.frombuffer(items, "<u2"), np.arange(1 << 15))  # as docs/format.md has them
    assert np.array_equal(unpack_scales(items), numbers) and unpack_scales(b"").size == 0


@pytest.mark.parametrize("number", [-32768, -(1 << 14) - 1, 1 << 14, 32767])
def test_others_are_refused(number):
    """Files up to format version 7 could hold them, and what a merge made of these could not be read."""
    with pytest.raises(CodingError, match=str(number)):
        pack_scales(np.array([0, number], np.int16))


@pytest.mark.parametrize("item", [1 << 15, 65535])
def test_items_of_no_number_are_refused(item):
    with pytest.raises(CodingError, match=f"item 1 of scales is {item}"):
        unpack_scales(np.array([1, item], "<u2").tobytes())
