"""The functions for W&B and MLflow in docs/report.md, as they stand, with both; what they logged is read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.report import scalars
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT
from tests.helpers.states import perturb

PAGE = (ROOT / "docs" / "report.md").read_text()


def function(name: str, **given: Any) -> Any:
    """Return a function of the page."""
    (block,) = re.findall(r"python\n(def to_wandb.*?def to_mlflow.*?)```", PAGE, re.S)
    namespace = {"scalars": scalars, **given}
    exec(compile(block, "report.md", "exec"), namespace)
    return namespace[name]


def save_run(run: Path, on_save: Any) -> list[dsq_ckpt.SaveResult]:
    """Save three checkpoints, the last one in the background."""
    state = {"a.weight": torch.randn(64, 80)}
    results = [
        dsq_ckpt.save(perturb(state, number), run / f"step-{500 * number:06d}", on_save=on_save) for number in (1, 2)
    ]
    return [*results, dsq_ckpt.async_save(perturb(state, 3), run / "step-001500", on_save=on_save).result()]


def records(file: Path) -> list[Any]:
    """Return the records of an offline run, whose file has blocks as a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, events, parts, place = file.read_bytes(), [], b"", 7
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            events.append(Record.FromString(parts))
            parts = b""
    return events


@needs("wandb")
@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name, value in {"ERROR_REPORTING": "false", "CACHE_DIR": str(tmp_path), "CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = wandb.init(mode="offline", dir=tmp_path, project="dsq_ckpt", settings=wandb.Settings(silent=True))
    run.define_metric("checkpoint/*", step_metric="checkpoint/step")
    results = save_run(tmp_path / "run", function("to_wandb", run=run))
    run.finish()
    wandb.teardown()  # the process that writes the file ends
    (file,) = tmp_path.rglob("*.wandb")
    logged = [
        {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
        for record in records(file) if record.WhichOneof("record_type") == "history"
    ]
    assert [entry["checkpoint/step"] for entry in logged] == [500, 1000, 1500]
    for entry, result in zip(logged, results, strict=True):
        assert scalars.named(result).items() <= entry.items()


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its store of files, which needs no database."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.joinpath("store").as_uri())  # which `set_tracking_uri` leaves
    with mlflow.start_run() as run:
        results = save_run(tmp_path / "run", function("to_mlflow", run=run, mlflow=mlflow))
    client = mlflow.MlflowClient()
    for name in scalars.named(results[0]):
        metrics = client.get_metric_history(run.info.run_id, name)
        assert [metric.step for metric in metrics] == [500, 1000, 1500]
        assert [metric.value for metric in metrics] == [scalars.named(result)[name] for result in results]
