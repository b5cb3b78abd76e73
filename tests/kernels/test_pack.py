"""Streams of bits on every backend, byte for byte."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import reference_kernels
from tests.kernels.subjects import NAMES, assert_same, codes, subject_of


def check(subject, n, bits, offset=0):
    symbols = codes(n, n, 1 << bits)
    packed = subject.backend.pack(subject(symbols, offset), bits)
    subject.backend.check()
    assert_same(packed, reference_kernels.pack(symbols, bits))
    result = subject(np.full(n, 77, np.uint8), offset)
    subject.backend.unpack(subject(packed, offset), bits, result)
    assert_same(result, symbols)


@pytest.mark.parametrize("bits", range(1, 9))
def test_sizes(subject, bits):
    for n in subject.sizes[:-1]:
        check(subject, n, bits)
    check(subject, 300, bits, offset=3)


@pytest.mark.parametrize("bits", [3, 4])
def test_large(subject, bits):
    check(subject, subject.sizes[-1], bits)


def test_wrong_arguments(subject):
    symbols, out = subject(np.full(8, 9, np.uint8)), subject.empty(8)
    for bits in (0, 9):
        with pytest.raises(ValueError, match="bits"):
            subject.backend.pack(symbols, bits)
        with pytest.raises(ValueError, match="bits"):
            subject.backend.unpack(symbols, bits, out)
    with pytest.raises(ValueError, match="symbols: found"):
        subject.backend.pack(symbols, 3)
        subject.backend.check()
    with pytest.raises(ValueError, match="packed"):
        subject.backend.unpack(symbols, 7, out)
    with pytest.raises(ValueError, match="symbols"):
        subject.backend.pack(symbols.int(), 3)


@pytest.mark.parametrize("name", NAMES[2:])
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(0, 400), bits=st.integers(1, 8))
def test_any_length(name, monkeypatch, n, bits):
    check(subject_of(name, monkeypatch), n, bits)
