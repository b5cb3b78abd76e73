"""Scenarios of Trainer's last file of a checkpoint, `trainer_state.json`, with the state of callbacks."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate.state import PartialState
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from dsq_ckpt.engine.result import SaveResult
from dsq_ckpt.errors import ConfigError, DSQError, SaveFailed
from dsq_ckpt.integrations import huggingface
from tests.integrations.huggingface.workers.common import everything, names, same, sound, trainer

WRITES = 2
"""Times that a save writes `trainer_state.json`."""


class StepCounter(TrainerCallback, ExportableState):
    """A callback that counts steps, and whose count is in checkpoints."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


def counting_trainer(output: Path, last: int, *, asynchronous: bool = False, **options: Any) -> Trainer:
    options = {
        "more": {"callbacks": [StepCounter()]}, "restore_callback_states_from_checkpoint": True, "save_steps": 1,
        **options,
    }
    hf_trainer = trainer(output, last, **options)
    return huggingface.attach(hf_trainer, hf_trainer.dsq_config, asynchronous=asynchronous)


def stored_steps(directory: Path) -> int:
    state = json.loads((directory / "trainer_state.json").read_text())
    return int(state["stateful_callbacks"]["StepCounter"]["args"]["steps"])


@contextmanager
def failing_write(number: int | None, fail: Callable[[str], object]) -> Iterator[None]:
    """Call `fail` with the path before the write with this number of the state at step 2; None: before each."""
    write, count = TrainerState.save_to_json, 0

    def failing(state: TrainerState, path: str) -> None:
        nonlocal count
        count += state.global_step == 2
        if state.global_step == 2 and number in (count, None):
            fail(path)
        write(state, path)

    with mock.patch.object(TrainerState, "save_to_json", failing):
        yield


def fill_disk(path: str) -> None:
    """Fail as a write to a full disk, which leaves an empty file."""
    Path(path).write_text("")
    raise OSError(errno.ENOSPC, "No space left on device", path)


def callback_states(output: Path) -> None:
    """`on_save` sees callbacks as they are at its own checkpoint, in either mode, and a restart goes on from there."""
    for asynchronous in (False, True):
        run_directory, seen = output / str(asynchronous), dict[str, int]()

        def look(result: SaveResult, seen: dict[str, int] = seen) -> None:
            seen[Path(result.path).name] = stored_steps(Path(result.path))

        hf_trainer = counting_trainer(run_directory, 2, asynchronous=asynchronous)
        huggingface.attach(hf_trainer, "exact", on_save=look, asynchronous=asynchronous).train()
        assert seen == ({"checkpoint-1": 1, "checkpoint-2": 2} if PartialState().process_index == 0 else {})
        counting_trainer(run_directory, 3, asynchronous=asynchronous).train(resume_from_checkpoint=True)
        assert stored_steps(run_directory / "checkpoint-3") == 3


def killed_in_last_write(output: Path) -> None:
    """A process that is killed before or in a write of the state leaves the checkpoint before as the newest.

    What it leaves is a copy of the directory at that moment; the run that is copied goes on.
    """
    run_directory, left = output / "whole", list[Path]()

    def copy(path: str) -> None:
        number = 1 + len(left) // 2
        for truncates in (False, True):
            if truncates:
                Path(path).write_text("")
            left.append(shutil.copytree(run_directory, output / f"{number}_{truncates}"))

    whole = counting_trainer(run_directory, 2)
    with failing_write(None, copy):
        whole.train()
    assert len(left) == 2 * WRITES
    for directory in left:
        assert get_last_checkpoint(directory) == str(directory / "checkpoint-1")
        again = counting_trainer(directory, 2)
        again.train(resume_from_checkpoint=True)
        assert names(directory) == ["checkpoint-1", "checkpoint-2"]
        assert stored_steps(directory / "checkpoint-2") == 2
        same(everything(whole), everything(again))


def full_disk_in_last_write(output: Path) -> None:
    """A write of the state that fails on rank 0 is one error on all ranks in either mode, and leaves no checkpoint."""
    rank, is_distributed = PartialState().process_index, dist.is_initialized()
    text = r"rank 0: OSError: .*No space left" if is_distributed else "No space left"
    for asynchronous in (False, True):
        for number in range(1, WRITES + 1):
            run_directory = output / f"{number}_{asynchronous}"
            hf_trainer = counting_trainer(run_directory, 3, asynchronous=asynchronous)
            with (
                failing_write(number, fill_disk),
                pytest.raises(DSQError, match="rank 0 failed.*No space left" if rank else text) as caught,
            ):
                hf_trainer.train()
            assert isinstance(caught.value, SaveFailed)
            assert hf_trainer.state.global_step == 2
            if is_distributed:
                dist.barrier()  # rank 0 removes what is left
            assert names(run_directory) == ["checkpoint-1"]
        counting_trainer(run_directory, 2).train(resume_from_checkpoint=True)  # from the same after either write
        assert stored_steps(run_directory / "checkpoint-2") == 2 and sound(run_directory / "checkpoint-2")


def writing_in_subclass(output: Path) -> None:
    """A file that a subclass writes in `_save_checkpoint` is part of the checkpoint when it gets its name.

    A subclass that saves nothing by Trainer's own method is refused, and files beside the checkpoint's directory.
    """

    class Writing(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            directory = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            (directory / "notes.txt").write_text(str(self.state.global_step))

    class Replacing(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Path(self._get_output_dir(trial), "adapter.bin").parent.mkdir(parents=True, exist_ok=True)

    class Beside(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            Path(self._get_output_dir(trial), "beside.txt").touch()

    seen = []
    hf_trainer = trainer(output, 4, attached=False)
    hf_trainer.__class__ = Beside
    with pytest.raises(SaveFailed, match=r"'beside\.txt' was written beside the files of .*checkpoint-2"):
        huggingface.attach(hf_trainer).train()
    assert names(output) == []
    hf_trainer = trainer(output, 4, attached=False)
    hf_trainer.__class__ = Replacing
    with pytest.raises(ConfigError, match=r"checkpoint-2': .* overrides _save_checkpoint"):
        huggingface.attach(hf_trainer).train()
    assert names(output) == []
    hf_trainer = trainer(output, 4, attached=False)
    hf_trainer.__class__ = Writing
    huggingface.attach(hf_trainer, "exact", on_save=lambda result: seen.append((result.path / "notes.txt").read_text()))
    hf_trainer.train()
    assert seen == ["2", "4"]
    assert sound(output / "checkpoint-4").beside.count("notes.txt") == 1


def linked_checkpoint(output: Path) -> None:
    """A save replaces what a link with the name of the checkpoint points to, in either mode."""
    for asynchronous in (False, True):
        run_directory, elsewhere = output / str(asynchronous), output / f"{asynchronous}_elsewhere"
        counting_trainer(run_directory, 2).train()
        (run_directory / "checkpoint-2").rename(elsewhere)
        (run_directory / "checkpoint-2").symlink_to(elsewhere)
        before = sound(elsewhere).save_id
        counting_trainer(run_directory, 2, asynchronous=asynchronous).train()
        assert (run_directory / "checkpoint-2").is_symlink() and sound(elsewhere).save_id != before
        assert not [name for name in names(output) if name.startswith(".")]
