"""Only what has changed, and the way back, on every backend."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.subjects import NAMES, assert_same, codes, subject_of


def changed(seed, n, share):
    parent = codes(seed, n)
    return parent, np.where(np.random.default_rng(seed + 1).random(n) < share, codes(seed + 2, n), parent)


def check(subject, n, share, seed=0, offset=0):
    parent, later = changed(seed, n, share)
    before = subject(parent, offset)
    changes = subject.backend.find_changes(subject(later, offset), before)
    where = np.flatnonzero(parent != later)
    assert_same(changes[0], where.astype(np.int32))
    assert_same(changes[1], later[where])
    assert int(changes[2]) == len(where)
    for out in (subject.empty(n), before):
        subject.backend.apply_changes(before, *changes[:2], out)
        subject.backend.check()
        assert_same(out, later)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_sizes(subject, share):
    for n in subject.sizes:
        check(subject, n, share)
    check(subject, 300, share, offset=3)


def test_room(subject):
    """Of elements that fit, all come; of others, those that fit, and how many there are."""
    parent, later = changed(1, 300, 0.2)
    where = np.flatnonzero(parent != later)
    m = len(where)
    for capacity in (0, 1, m - 1, m, m + 1, 400):
        positions, new, count = subject.backend.find_changes(subject(later), subject(parent), capacity)
        served = min(m, capacity)
        assert int(count) == m and min(len(positions), len(new)) >= served
        assert_same(positions[:served], where[:served].astype(np.int32))
        assert_same(new[:served], later[where][:served])


def test_long_positions(subject):
    """Positions of more than 2**31 elements are 64 bits wide."""
    positions, new, out = torch.tensor([2, 299]), np.array([7, 8], np.uint8), subject.empty(300)
    subject.backend.apply_changes(subject(np.zeros(300, np.uint8)), subject(positions), subject(new), out)
    assert out.cpu().nonzero().view(-1).tolist() == [2, 299]


def test_wrong_arguments(subject):
    parent, out, new = subject(codes(0, 20)), subject.empty(20), subject(codes(1, 1))
    with pytest.raises(ValueError, match="parent"):
        subject.backend.find_changes(parent, parent[:-1])
    for wrong in (-1, 20, 2**31 - 1):
        with pytest.raises(ValueError, match="positions: found"):
            subject.backend.apply_changes(parent, subject(torch.tensor([wrong], dtype=torch.int32)), new, out)
            subject.backend.check()
    with pytest.raises(ValueError, match="positions"):
        subject.backend.apply_changes(parent, subject(torch.tensor([1, 2])), new, out)
    with pytest.raises(ValueError, match="out"):
        subject.backend.apply_changes(parent, subject(torch.tensor([1])), new, out[:-1])


@pytest.mark.parametrize("name", NAMES[2:])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(0, 300), share=st.sampled_from([0.0, 0.02, 0.5, 1.0]), seed=st.integers(0, 99))
def test_any_change(name, monkeypatch, n, share, seed):
    check(subject_of(name, monkeypatch), n, share, seed)
