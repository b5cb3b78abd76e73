"""`on_save`: called once for each committed checkpoint, by every way to save, and unable to harm one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dsq_ckpt
from dsq_ckpt.report import scalars
from dsq_ckpt.storage.manifest import is_complete
from tests.helpers.states import perturb


@pytest.fixture
def state():
    return {"a.weight": torch.randn(64, 80), "step": 1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_way_to_save_tells_once(tmp_path, state):
    told: list[dsq_ckpt.SaveResult] = []

    def on_save(result: dsq_ckpt.SaveResult) -> None:
        assert is_complete(result.path)
        told.append(result)

    results = [dsq_ckpt.save(state, tmp_path / "step-1", on_save=on_save)]
    results.append(dsq_ckpt.async_save(perturb(state, 1), tmp_path / "step-2", on_save=on_save).result())
    assert told == results
    for number, call in ((3, dcp.save), (4, lambda *a, **k: dcp.async_save(*a, **k).result())):
        call(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / f"step-{number}", on_save=on_save))
    model = nn.Linear(64, 80)
    batch = torch.randn(32, 64)
    target = model(batch).detach() + torch.randn(32, 80)
    compressor = dsq_ckpt.Compressor(
        model, evaluate=lambda: float((model(batch).detach() - target).square().mean()), on_save=on_save
    )
    results = [compressor.save(tmp_path / "other" / "5"), compressor.save(tmp_path / "other" / "6", background=True)]
    assert [results[0], results[1].result()] == told[4:] and told[4].degradation is not None
    assert [result.path.name for result in told] == ["step-1", "step-2", "step-3", "step-4", "5", "6"]
    assert [result.depth for result in told] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("errors", [False, True])
def test_errors_of_on_save_harm_no_checkpoint(tmp_path, state, errors, caplog):
    def on_save(result):
        raise KeyError("no run")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if errors else "always")
        result = dsq_ckpt.save(state, tmp_path / "1", on_save=on_save)
        second = dsq_ckpt.async_save(perturb(state, 1), tmp_path / "2", on_save=on_save).result()
    said = caplog.messages if errors else [str(warning.message) for warning in caught]
    for number in (1, 2):
        text = f"'{tmp_path / str(number)}' is complete, but after its commit on_save raised KeyError: 'no run'"
        assert said.count(text) == 1
    assert (result.depth, second.depth) == (0, 1)
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "2")


@pytest.mark.timeout(100)
def test_on_save_may_load_and_save(tmp_path, state):
    """Also in the thread of a save in the background, which it does not wait for."""
    targets: list[dict[str, object]] = []

    def on_save(result: dsq_ckpt.SaveResult) -> None:
        targets.append({})
        dsq_ckpt.load(targets[-1], result.path)
        dsq_ckpt.compress(state, tmp_path / "apart" / result.path.name)
        dsq_ckpt.save(state, tmp_path / "copies" / result.path.name)

    result = dsq_ckpt.async_save(state, tmp_path / "run" / "1", on_save=on_save).result()
    dsq_ckpt.save(state, tmp_path / "run" / "2", on_save=on_save)
    assert [target["step"] for target in targets] == [1, 1] and result.path.name == "1"
    for directory in ("apart", "copies"):
        assert dsq_ckpt.latest(tmp_path / directory) == str(tmp_path / directory / "2")


def test_a_failed_save_tells_nothing(tmp_path, state):
    told: list[object] = []
    dsq_ckpt.save(state, tmp_path / "1")
    with pytest.raises(dsq_ckpt.CheckpointExists):
        dsq_ckpt.save(state, tmp_path / "1", on_save=told.append)
    assert told == []
    with pytest.raises(dsq_ckpt.ConfigError, match="on_save is 'print', expected a function"):
        dsq_ckpt.save(state, tmp_path / "2", on_save="print")
    assert not (tmp_path / "2").exists()


def test_tensorboard_reads_it(tmp_path, state):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = tensorboard.SummaryWriter(tmp_path / "events")
    on_save = scalars.tensorboard(writer)
    results = []
    for number in range(3):
        state = perturb(state, number)
        results.append(dsq_ckpt.save(state, tmp_path / "run" / f"step-{500 * number:06d}", on_save=on_save))
    with pytest.warns(UserWarning, match="'best' has no number to take for the step"):
        dsq_ckpt.save(state, tmp_path / "run" / "best", on_save=on_save)
    other = scalars.tensorboard(writer, prefix="kept", step=lambda result: 7)
    dsq_ckpt.save(state, tmp_path / "run" / "last", on_save=other)
    writer.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    names = results[0].scalars()
    assert set(events.Tags()["scalars"]) == {f"{prefix}/{name}" for prefix in ("checkpoint", "kept") for name in names}
    for name in names:
        scalar_events = events.Scalars(f"checkpoint/{name}")
        assert [event.step for event in scalar_events] == [0, 500, 1000]
        assert [event.value for event in scalar_events] == pytest.approx([result.scalars()[name] for result in results])
    assert [event.step for event in events.Scalars("kept/ratio")] == [7]
