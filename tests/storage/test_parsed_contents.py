"""Tables of contents are parsed once by a process that loads a chain again."""

from __future__ import annotations

import functools

import pytest

import dsq_ckpt
from dsq_ckpt.storage import container
from tests.helpers.states import load_copy, mixed_state, perturb


@pytest.mark.parametrize("size", ["small", "large"])
def test_loads_parse_the_contents_of_each_file_once(tmp_path, monkeypatch, size):
    """Large tables, of which few stay in memory, where a chain has few files."""
    count, cached = (16, container._CACHED_SMALL) if size == "small" else (2, container._CACHED_LARGE)
    state = mixed_state()
    for number in range(count):
        dsq_ckpt.save(state, tmp_path / str(number))
        state = perturb(state, number)
    if size == "large":
        monkeypatch.setattr(container, "_MAX_SMALL", 0)
    parsed = []
    unpack = functools.lru_cache(cached)(lambda data: parsed.append(data) or container._unpack(data))
    monkeypatch.setattr(container, f"_unpack_{size}", unpack)
    for _ in range(2):
        load_copy(tmp_path / str(count - 1), state)
    assert count <= len(parsed) == len(set(parsed))
