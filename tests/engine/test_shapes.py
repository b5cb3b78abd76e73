"""Several states in one run directory: each has a chain of its own, and retention that does not touch the others."""

from __future__ import annotations

import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.engine.shapes import is_continuation
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import KEEP_ONE, find_differences, load_copy


def state_of(name: str, number: int = 0, shape: tuple[int, int] = (80, 90)) -> dict:
    g = torch.Generator().manual_seed(7)
    return {name: {"weight": torch.randn(*shape, generator=g) + 0.001 * number, "bias": torch.zeros(shape[0])}}


def record_saves(run, history=None, **states):
    """Save these states by name; what was said of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, state in states.items():
            dsq_ckpt.save(state, run / name, config=KEEP_ONE, history=history)
    return [str(warning.message) for warning in caught if "another state" in str(warning.message)]


def lineage(run, *names):
    return [(m.previous_name, m.depth, m.refinement) for m in (Manifest.read(run / name) for name in names)]


def test_another_state_keeps_its_refinement_and_its_chain(tmp_path):
    messages = record_saves(
        tmp_path, g1=state_of("gen"), d1=state_of("disc"), g2=state_of("gen", 1), d2=state_of("disc", 1),
        g3=state_of("gen", 2), d3=state_of("disc", 2),
    )
    assert lineage(tmp_path, "g1", "g2", "g3") == [(None, 0, "dropped"), ("g1", 1, "dropped"), ("g2", 2, "kept")]
    assert lineage(tmp_path, "d1", "d2", "d3") == [(None, 0, "dropped"), ("d1", 1, "dropped"), ("d2", 2, "kept")]
    assert len(messages) == 1 and "'g1'" in messages[0]
    for name, like in (("g3", state_of("gen", 2)), ("d3", state_of("disc", 2))):
        load_copy(tmp_path / name, like, refinement=True)


def test_equal_names_of_other_shapes_are_another_state(tmp_path):
    messages = record_saves(tmp_path, a=state_of("model"), b=state_of("model", shape=(90, 80)), a2=state_of("model", 1))
    assert lineage(tmp_path, "a", "b", "a2") == [(None, 0, "dropped"), (None, 0, "kept"), ("a", 1, "kept")]
    assert len(messages) == 1


def test_loads_tell_which_chains_go_on_after_a_restart(tmp_path):
    record_saves(tmp_path, g1=state_of("gen"), d1=state_of("disc"), g2=state_of("gen", 1), d2=state_of("disc", 1))
    history = dsq_ckpt.SaveHistory()
    for name, like in (("g2", state_of("gen")), ("d2", state_of("disc"))):
        load_copy(tmp_path / name, like, history=history)
    assert record_saves(tmp_path, history, g3=state_of("gen", 2), d3=state_of("disc", 2)) == []
    assert lineage(tmp_path, "g3", "d3") == [("g2", 2, "kept"), ("d2", 2, "kept")]
    # back to an older one: that alone is the parent of its state now
    load_copy(tmp_path / "g1", state_of("gen"), history=history)
    record_saves(tmp_path, history, g4=state_of("gen", 3), d4=state_of("disc", 3))
    assert lineage(tmp_path, "g4", "d4") == [("g1", 1, "kept"), ("d3", 3, "kept")]


def test_a_model_that_grows_goes_on_and_a_part_of_it_does_not_replace_it(tmp_path):
    whole = {**state_of("a"), **state_of("b"), **state_of("c")}
    messages = record_saves(tmp_path, s1={**state_of("a"), **state_of("b")}, s2=whole, part=state_of("a"), s3=whole)
    assert lineage(tmp_path, "s1", "s2", "part", "s3") == [
        (None, 0, "dropped"), ("s1", 1, "dropped"), (None, 0, "kept"), ("s2", 2, "kept"),
    ]
    assert len(messages) == 1
    load_copy(tmp_path / "s3", whole, refinement=True)


def test_a_parent_named_by_the_caller_serves_another_state_but_is_not_replaced_by_it(tmp_path):
    whole = {**state_of("a"), **state_of("b"), **state_of("c")}
    dsq_ckpt.save(whole, tmp_path / "whole", config=KEEP_ONE)
    dsq_ckpt.save(state_of("a"), tmp_path / "part", config=KEEP_ONE, parent=tmp_path / "whole")
    assert lineage(tmp_path, "whole", "part") == [(None, 0, "kept"), (None, 1, "kept")]


@pytest.mark.parametrize("newer, older, expected", [
    ({}, {}, True), ({}, {"a": (3,)}, False), ({"a": (3,)}, {}, False), ({"a": (3,)}, {"a": (3,)}, True),
    ({"a": (4,)}, {"a": (3,)}, False), ({"a": (2,), "b": (9,)}, {"a": (2,), "c": (2,)}, True),
    ({"a": (2,), "b": (9,)}, {"a": (2,), "c": (3,)}, False), ({"step": ()}, {"step": ()}, True),
])
def test_which_state_continues_which(newer, older, expected):
    assert is_continuation(newer, older) is expected


def test_a_failed_save_leaves_the_one_before_as_the_parent(tmp_path, monkeypatch):
    record_saves(tmp_path, g1=state_of("gen"), d1=state_of("disc"))

    def full(*_, **__):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("dsq_ckpt.engine.commit.write_index", full)
        for name, state in (("g2", state_of("gen", 1)), ("d2", state_of("disc", 1))):
            with pytest.raises(dsq_ckpt.SaveFailed, match="no space"):
                dsq_ckpt.save(state, tmp_path / name)
    record_saves(tmp_path, g3=state_of("gen", 2), d3=state_of("disc", 2))
    assert lineage(tmp_path, "g3", "d3") == [("g1", 1, "kept"), ("d1", 1, "kept")]


def held() -> int:
    """Bytes of codes and values that this process remembers."""
    memories = [checkpoint.cache for checkpoint in default_history().checkpoints()]
    return sum(
        array.nbytes for memory in memories for arrays in (memory.codes, memory.values) for array in arrays.values()
    )


def test_memory_is_bounded_where_each_step_has_a_directory_of_its_own(tmp_path):
    once = None
    for number in range(24):
        dsq_ckpt.save(state_of("model", number), tmp_path / str(number) / "checkpoint")
        once = once or held()
        assert 0 < held() <= 2 * once
    for number in range(24):  # and of states that are all different
        dsq_ckpt.save(state_of(f"model{number}"), tmp_path / "many" / str(number))
        assert held() <= 5 * once


def test_runs_side_by_side_keep_their_codes(tmp_path):
    """Two models of equal shapes, each in its run: after a checkpoint or two neither is decoded for the next save."""
    for number in range(3):
        for run in "ab":
            dsq_ckpt.save(state_of("model", number), tmp_path / run / str(number))
    newest = [checkpoint for checkpoint in default_history().checkpoints() if checkpoint.path.name == "2"]
    assert len(newest) == 2 and all(checkpoint.cache for checkpoint in newest)
    assert lineage(tmp_path / "a", "2") == [("1", 2, "kept")]
    back = [load_copy(tmp_path / run / "2", state_of("model", 2)) for run in "ab"]
    assert find_differences(*back) == []


def test_a_text_of_changing_length_makes_no_other_state(tmp_path):
    """A small model beside a large encoded text, which has another shape at every save."""
    for step in range(3):
        state = {"a": torch.ones(8), "b": torch.ones(9), "text": torch.zeros(500 + step, dtype=torch.uint8)}
        dsq_ckpt.save(state, tmp_path / "run" / str(step))
    assert Manifest.read(tmp_path / "run" / "2").previous == Manifest.read(tmp_path / "run" / "1").save_id
