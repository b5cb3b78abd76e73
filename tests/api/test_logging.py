"""The logger `dsq_ckpt`: what is said of saves and loads, and that nothing is printed."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_loads_and_decisions(tmp_path, caplog, capfd):
    state = {"w": torch.randn(64, 80), "step": 1}
    dsq_ckpt.save(state, tmp_path / "1")
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.DEBUG, "dsq_ckpt"):
        second = dsq_ckpt.save(state, tmp_path / "2")
        dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "3", parent=None))
        dsq_ckpt.load(state, tmp_path / "2")
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("dsq_ckpt.")]
    assert told[:2] == [("DEBUG", f"2: a delta against '{tmp_path / '1'}'"), ("INFO", str(second))]
    assert told[2] == ("DEBUG", "3: a keyframe") and told[3][0] == "INFO" and told[3][1].startswith("3: ")
    assert told[4][0] == "INFO" and told[4][1].startswith("loaded 2: 1 chunks, base and refinement, depth 1, ")
    assert len(told) == 5
    assert capfd.readouterr() == ("", "")


class Talkative:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        logging.error("loads %s", sorted(state), exc_info=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_messages_that_others_log_during_a_load_are_left_alone(tmp_path, caplog):
    """Only the traceback of an error that is raised anyway is kept back."""
    dsq_ckpt.save({"own": {"w": torch.ones(3)}}, tmp_path / "1")
    dsq_ckpt.load({"own": Talkative()}, tmp_path / "1")
    assert "loads ['w']" in caplog.messages
    caplog.clear()
    with pytest.raises(dsq_ckpt.LoadFailed):
        dsq_ckpt.load({"absent": torch.ones(3)}, tmp_path / "1")
    assert not [record for record in caplog.records if record.exc_info]
