"""Partitioning of a source over ranks: all of it once, evenly, cut only where it is mapped, tied tensors together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.convert import partitioner
from dsq_ckpt.convert.partitioner import partition_source
from dsq_ckpt.convert.sources import InMemory, open_source
from tests.helpers.source_files import plain_state, write_dcp_in_parts, write_torch
from tests.helpers.states import find_differences, flat_tensors, mixed_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def small(monkeypatch):
    """Parts as small as tests have tensors."""
    monkeypatch.setattr(partitioner, "_MIN_PART_BYTES", 1)


def coverage(source, dealt):
    """How often each element is dealt, by tensor."""
    counts = {name: torch.zeros(stored.shape, dtype=torch.int64) for name, stored in source.tensors.items()}
    for key in (key for mine in dealt for key in mine):
        counts[key.fqn][tuple(slice(start, start + n) for start, n in zip(key.offsets, key.shape, strict=True))] += 1
    return counts


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8)


@settings(deadline=None)
@given(shapes, st.integers(1, 6), st.booleans())
def test_all_of_it_once_and_evenly(given_shapes, ranks, tied):
    state = {f"t{number}": torch.ones(shape) for number, shape in enumerate(given_shapes)}
    if tied:
        state["tied"] = state["t0"]
    source = InMemory(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "_MIN_PART_BYTES", 1)
        dealt = partition_source(source, ranks)
        untied = InMemory({name: value.clone() for name, value in state.items()})
        assert dealt == partition_source(untied, ranks) or tied
    assert len(dealt) == ranks
    assert all((count == 1).all() for count in coverage(source, dealt).values())
    bytes_of = [sum(4 * math.prod(key.shape) for key in mine if key.fqn != "tied") for mine in dealt]
    largest = max(4 * math.prod(key.shape) for mine in dealt for key in mine)
    assert max(bytes_of) - min(bytes_of) <= largest
    if tied and source.tensors["t0"].memory is not None:
        places = [{key[1:] for key in mine if key.fqn == name} for name in ("t0", "tied") for mine in dealt]
        assert places[:ranks] == places[ranks:]


def test_parts_are_what_they_are_called(tmp_path, small):
    """What ranks read of a mapped file is in its place; one rank reads whole tensors."""
    state = mixed_state()
    source = open_source(write_torch(state, tmp_path / "a"))
    dealt = partition_source(source, 3)
    assert max(len([key for mine in dealt for key in mine if key.fqn == name]) for name in source.tensors) > 1
    tensors = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in source.tensors.items()}
    for mine in dealt:
        for key, value in source.read(mine).items():
            assert tuple(value.shape) == key.shape
            tensors[key.fqn][tuple(slice(o, o + n) for o, n in zip(key.offsets, key.shape, strict=True))] = value
    assert find_differences(tensors, flat_tensors(state)) == []
    assert len(partition_source(source, 1)[0]) == len(source.tensors)


def test_chunks_of_other_sources_stay_whole(tmp_path, small):
    source = open_source(write_dcp_in_parts(plain_state(), tmp_path / "a"))
    dealt = partition_source(source, 3)
    stored = [(name, *chunk) for name, tensor in source.tensors.items() for chunk in tensor.chunks]
    assert sorted(key for mine in dealt for key in mine) == sorted(stored)
    assert min(map(len, dealt)) > 1


def test_small_tensors_are_not_cut():
    source = InMemory({"a": torch.ones(1000), "b": torch.ones(1000)})
    assert [len(mine) for mine in partition_source(source, 4)] == [1, 1, 0, 0]
