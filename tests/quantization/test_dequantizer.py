"""Values of codes past the range of fp32, against the reader that was written from docs/format.md alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.dequantizer import Dequantizer
from tests.helpers import independent_reader as independent

LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize("bits", [0, 2])
@pytest.mark.parametrize("exponent", [-0.0033, 0.0, 0.0033, 3.0])
@pytest.mark.parametrize("domain", ["linear", "log"])
def test_values_past_the_largest_number(domain, exponent, bits):
    levels = np.array([0.0, -3.5e38, 1e-3, 3.3e38, 3.5e38, 1e300])
    edges = np.abs(levels) if domain == "linear" else np.full(6, 254.0)  # equal: not refined
    book = Codebook(levels, KeyWindow(100, 200), domain, 0.0, edges, edges)
    codes, values = np.arange(6, dtype=np.uint8), np.empty(6, np.float32)
    symbols = np.ones(6, np.uint8) if bits else None
    Dequantizer(book, exponent, bits).block(codes, np.empty(0, np.uint32), symbols, values)
    tree = {"levels": levels.tolist(), "cells": [edges.tolist(), edges.tolist()], "domain": domain}
    scale, symbol = independent.scale_of(exponent), 1 if bits else None
    expected = [independent.value(tree, code, scale, symbol, bits) for code in range(6)]
    assert values.tolist() == [float(value) for value in expected] and max(values) == LARGEST


def test_protected_values_are_as_stored_beside_values_past_the_largest_number():
    levels = np.array([0.0, 3.5e38])
    book = Codebook(levels, KeyWindow(100, 200), "log", 0.0, np.array([0.0, 254.0]), np.array([0.0, 254.0]))
    codes, protected = np.array([2, 1, 2], np.uint8), np.array([np.nan, np.inf], np.float32)
    values = np.empty(3, np.float32)
    Dequantizer(book, 0.0, 0).block(codes, protected.view(np.uint32), None, values)
    on_device = Dequantizer(book, 0.0, 0).on_device(torch.from_numpy(codes), torch.from_numpy(protected), None)
    for found in (values, on_device.numpy()):
        np.testing.assert_array_equal(found, np.array([np.nan, LARGEST, np.inf], np.float32))
