"""Ranges of addresses are apart or not, as a search of all addresses says."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsq_ckpt.core.address_ranges import AddressRanges, address_range


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12))))
def test_against_a_set_of_all_addresses(added):
    ranges, held = AddressRanges(), set()
    for start, length in added:
        own = set(range(start, start + length))
        overlaps = [range(*part) for part in ranges.find_overlaps(start, start + length)]
        assert {address for part in overlaps for address in part} == own & held and all(overlaps)
        assert ranges.add(start, start + length) == own.isdisjoint(held)
        held |= own


def test_memory_of_views():
    whole = torch.zeros(4, 6)
    start = whole.data_ptr()
    assert address_range(whole) == (start, start + 96)
    assert address_range(whole[:, 2]) == (start + 8, start + 84)
    assert address_range(whole.T) == address_range(whole)
    assert address_range(whole[0, 0]) == (start, start + 4)
    assert address_range(whole[4:]) == (0, 0)
