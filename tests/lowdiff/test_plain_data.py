"""Plain data survives JSON as it was, types included."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.errors import ConfigError, CorruptCheckpoint
from dsq_ckpt.lowdiff.plain_data import from_plain, to_plain
from tests.lowdiff.loops import differences

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.sampled_from(["$tuple"])
values = st.recursive(leaves, lambda inner: (
    st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3)
    | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
), max_leaves=12)


def through(value):
    """As a file gives it back: JSON without NaN and Infinity."""
    return from_plain(parse_strict_json(json.dumps(to_plain(value, "it"))))


@given(values)
def test_round_trip(value):
    assert differences(through(value), value) == []


@pytest.mark.parametrize("value", [
    math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**70, Counter({3: 2}), {1: {"$float": "x"}}, {"$": 1},
    torch.tensor([1.0, math.nan, -0.0]), torch.tensor(0.1, dtype=torch.float64), torch.empty(0, 3),
    torch.randn(3, 4).bfloat16(), torch.randn(4, 3).t(), torch.tensor(True), torch.arange(5),
])
def test_states_survive_json(value):
    again = through(value)
    assert type(again) is type(value) and differences(again, value) == []


def test_numpy():
    again = through({"a": np.arange(6).reshape(2, 3), "b": np.float32(0.5), "c": np.inf})
    assert np.array_equal(again["a"], np.arange(6).reshape(2, 3)) and again["a"].dtype == np.int64
    assert (again["b"], again["c"]) == (0.5, math.inf)


@pytest.mark.parametrize(("value", "says"), [
    ({"a": [1, object()]}, r"it\.a\[1\] is a object"), ({"f": test_numpy}, "it.f is a function"),
    (torch.zeros(1 << 19), "2097152 bytes"), ({1, 2}, "set"),
])
def test_unsupported_values_are_refused(value, says):
    with pytest.raises(ConfigError, match=says):
        to_plain(value, "it")


def test_a_default_dict_becomes_a_dict():
    assert through(defaultdict(int, a=1)) == {"a": 1}


@pytest.mark.parametrize("value", [
    {"$new": 1}, {"$tensor": ["float32", [2], "AAAA"]}, {"$tensor": ["object", [1], ""]}, {"$bytes": "?"},
    {"$dict": [[1]]}, {"$float": "x"}, {"$tuple": 3},
])
def test_forged_plain_data_is_refused(value):
    with pytest.raises(CorruptCheckpoint):
        from_plain(value)
