"""Warnings point at the line of the caller, whatever lies between it and the place that found a reason to warn."""

from __future__ import annotations

import inspect
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.core import notices

IDLE = {"quantize": {"rules": [{"pattern": "no.such.tensor", "group": "mine"}], "groups": {"mine": {}}}}


def current_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def state() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.randn(64, 80).index_fill_(0, torch.tensor([3]), float("nan")), "b": torch.ones(3)}


def tensor_warnings(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [warning for warning in caught if "tensor" in str(warning.message)]


@pytest.mark.parametrize("way", ["save", "dcp.save", "async_save", "dcp.async_save"])
def test_the_callers_line(tmp_path, way):
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "1", IDLE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "save":
            line, _ = current_line(), dsq_ckpt.save(state(), tmp_path / "1", config=IDLE)
        elif way == "dcp.save":
            line, _ = current_line(), dcp.save(state(), storage_writer=writer)
        elif way == "async_save":
            line, _ = current_line(), dsq_ckpt.async_save(state(), tmp_path / "1", config=IDLE).result()
        else:
            line, _ = current_line(), dcp.async_save(state(), storage_writer=writer).result()
    assert len(tensor_warnings(caught)) == 3, [  # NaN, an idle rule, an idle group
        str(warning.message) for warning in caught
    ]
    assert {(warning.filename, warning.lineno) for warning in tensor_warnings(caught)} == {(__file__, line)}
    assert way.startswith("dcp.") or len(caught) == 3, "dsq_ckpt's own calls know that a process is alone"


def test_once_for_a_line_by_default():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            notices.warn("a text")
    assert len(caught) == 1


@pytest.mark.parametrize("save", [dsq_ckpt.async_save, dsq_ckpt.save])
def test_a_save_in_a_thread_says_a_text_once_for_a_line_too(tmp_path, save):
    """As Python does by default: at every save of a training it would be read no more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(3):
            done = save(state(), tmp_path / str(number))
            if save is dsq_ckpt.async_save:
                done.result()
        assert pickle.loads(pickle.dumps(warnings.filters)) == warnings.filters  # as libraries send them to processes
    assert len([warning for warning in caught if "NaN or Inf" in str(warning.message)]) == 1
    assert not any("single process" in str(warning.message) for warning in caught)


def test_texts_that_differ_in_numbers_alone_are_one():
    told = set()
    texts = ["it gave 1.78484 for both", "it gave nan for both", "it gave -3.2e-05 for both", "0x7f3a gave 2 for both"]
    assert [notices.is_new_warning(text, told) for text in texts] == [True, False, False, True]
    assert notices.is_new_warning("it gave 1.78484 for one", told)
    assert not notices.is_new_warning("0x2bc0 gave inf for both", told)


def test_one_rank_warns():
    with pytest.warns(UserWarning, match="a text") as recorded:
        for rank in (1, 0):
            notices.warn("a text", rank=rank)
    assert len(recorded) == 1


def test_all_ranks_raise_a_warning_that_is_an_error():
    """Else the others would wait in a collective for the one that raised it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for rank in (0, 1):
            with pytest.raises(UserWarning, match="found"):
                notices.warn("found", rank=rank)


def test_a_warning_undoes_nothing(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notices.warn_safely("a text")
    assert caplog.messages == ["a text"]
