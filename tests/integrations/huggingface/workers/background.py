"""Scenarios of `attach(trainer, asynchronous=True)`: a thread gives a checkpoint its name while training goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint

from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.integrations import huggingface, staged_checkpoint
from tests.integrations.huggingface.workers.common import everything, names, same, sound, trainer, until

PATIENCE = 300.0


def background_trainer(output: Path, last: int, **options: Any) -> Trainer:
    hf_trainer = trainer(output, last, **options)
    return huggingface.attach(hf_trainer, hf_trainer.dsq_config, asynchronous=True)


@contextmanager
def before_publishing(number: int, work: Callable[[], object]) -> Iterator[None]:
    """Call `work` in the thread that is about to give checkpoint `number` its name."""
    rename = staged_checkpoint.replace_directory

    def replaced(hidden: Path, goal: Path) -> None:
        if goal.name == f"checkpoint-{number}":
            assert threading.current_thread() is not threading.main_thread()
            work()
        rename(hidden, goal)

    staged_checkpoint.replace_directory = replaced
    try:
        yield
    finally:
        staged_checkpoint.replace_directory = rename


class At(TrainerCallback):
    """Calls a function at the beginning of a step."""

    def __init__(self, step: int, work: Callable[[], object]) -> None:
        self.step, self.work = step, work

    def on_step_begin(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            self.work()


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def in_background(output: Path) -> None:
    """Training goes on before the checkpoint is there; then it is the one that a save in its place gives."""
    plain = trainer(output / "plain", 6)
    plain.train()
    seen: list[list[str]] = []
    begun = threading.Event()

    def later() -> None:
        seen.append([name for name in names(output / "made") if not name.startswith(".")])
        begun.set()

    hf_trainer = background_trainer(output / "made", 6, more={"callbacks": [At(5, later)]})
    with before_publishing(4, lambda: begun.wait(PATIENCE)):
        hf_trainer.train()
    assert seen == [["checkpoint-2"]], "checkpoint-4 has no name at step 5"
    assert names(output / "made") == names(output / "plain") == ["checkpoint-4", "checkpoint-6"]
    same(everything(plain), everything(hf_trainer))
    for name in names(output / "made"):
        own, other = output / "made" / name, output / "plain" / name
        files = [{name for name in names(place) if not name.endswith((".dsq", ".index"))} for place in (own, other)]
        assert files[0] == files[1]
        assert json.loads((own / "trainer_state.json").read_text()) == json.loads(
            (other / "trainer_state.json").read_text()
        )
        assert sound(own).kinds.keys() == sound(other).kinds.keys()
    copy = until(output / "made", output / "copy", 4)
    again = background_trainer(copy, 6)
    again.train(resume_from_checkpoint=True)
    same(everything(plain), everything(again))
    assert names(copy) == ["checkpoint-4", "checkpoint-6"]


def deltas_in_background(output: Path) -> None:
    """Each is coded against the one before, and loses its refinement when it is old."""
    hf_trainer, told = trainer(output, 5, config=None, save_steps=1, save_total_limit=4), []
    huggingface.attach(hf_trainer, on_save=told.append, asynchronous=True).train()
    assert [result.path for result in told] == [output / f"checkpoint-{number}" for number in range(1, 6)]
    manifests = [sound(output / f"checkpoint-{number}") for number in range(2, 6)]
    assert [manifest.depth for manifest in manifests] == [1, 2, 3, 4]
    assert [manifest.refinement for manifest in manifests] == ["dropped"] + ["kept"] * 3
    assert names(output) == [f"checkpoint-{number}" for number in range(2, 6)]


def best_in_background(output: Path) -> None:
    """The best checkpoint, be it an old one or the one that is not complete yet, is kept and loaded at the end."""
    for best, limit, left in ((2, 1, ["checkpoint-2"]), (4, 2, ["checkpoint-3", "checkpoint-4"])):
        luck = iter([3.0 if number == best else 1.0 for number in range(1, 5)])
        run = output / str(best)
        hf_trainer = background_trainer(
            run, 4, save_steps=1, eval_steps=1, eval_strategy="steps", metric_for_best_model="luck",
            greater_is_better=True, load_best_model_at_end=True, save_total_limit=limit,
            more={"compute_metrics": lambda _, luck=luck: {"luck": next(luck)}},
        )
        hf_trainer.train()
        assert names(run) == left
        assert hf_trainer.state.best_model_checkpoint == str(run / f"checkpoint-{best}")
        state = json.loads((run / f"checkpoint-{best}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(run / f"checkpoint-{best}")
        assert sound(run / f"checkpoint-{best}").pinned


def moved_in_background(output: Path) -> None:
    """A run that goes on in another directory keeps its best checkpoint, and loads it at the end."""
    luck = iter([1.0, 3.0, 1.0, 1.0, 1.0])

    def make_trainer(run: Path, last: int) -> Trainer:
        return background_trainer(
            run, last, save_steps=1, eval_steps=1, eval_strategy="steps", metric_for_best_model="luck",
            greater_is_better=True, load_best_model_at_end=True, save_total_limit=2,
            more={"compute_metrics": lambda _: {"luck": next(luck)}},
        )

    make_trainer(output / "before", 3).train()
    output.joinpath("before").rename(output / "after")
    again = make_trainer(output / "after", 5)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(output / "after" / "checkpoint-2")
    assert names(output / "after") == ["checkpoint-2", "checkpoint-5"]


def stopped_in_background(output: Path) -> None:
    """On SIGTERM Trainer marks a checkpoint as incomplete until its save returns: then it is complete."""
    seen: list[bool] = []

    class Looks(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if control.should_training_stop:  # after the callback that saved
                seen.append((output / "checkpoint-3" / "manifest.json").exists())

    hf_trainer = background_trainer(output, 6, enable_jit_checkpoint=True, save_strategy="no")
    (saves,) = [
        callback for callback in hf_trainer.callback_handler.callbacks if isinstance(callback, JITCheckpointCallback)
    ]
    hf_trainer.add_callback(Looks())
    hf_trainer.add_callback(At(3, lambda: setattr(saves.jit_manager, "is_checkpoint_requested", True)))
    with before_publishing(3, lambda: time.sleep(0.5)):
        hf_trainer.train()
    assert seen == [True]
    assert names(output) == ["checkpoint-3"] and "checkpoint-is-incomplete.txt" not in names(output / "checkpoint-3")


def only_model_in_background(output: Path) -> None:
    """Also without an optimizer."""
    background_trainer(output, 4, save_only_model=True).train()
    assert names(output) == ["checkpoint-2", "checkpoint-4"]
    assert "exp_avg" not in sound(output / "checkpoint-4").kinds and (output / "checkpoint-4/config.json").exists()


def failed_in_background(output: Path) -> None:
    """A failure is raised by the next save, or the end; what was saved before stays, and training can go on from it."""
    hf_trainer = background_trainer(output, 6)
    with before_publishing(4, full_disk), pytest.raises(SaveFailed, match="No space left on device"):
        hf_trainer.train()
    assert hf_trainer.state.global_step == 6, "at the next save"
    assert names(output) == ["checkpoint-2"]
    with before_publishing(4, full_disk), pytest.raises(SaveFailed, match="No space left on device"):
        background_trainer(output, 4, new=False).train(resume_from_checkpoint=True)  # the last save
    assert names(output) == ["checkpoint-2"]

    def broken() -> None:
        raise ZeroDivisionError

    hf_trainer = background_trainer(output, 6, new=False, more={"callbacks": [At(5, broken)]})
    with (
        before_publishing(4, full_disk), pytest.raises(ZeroDivisionError),
        pytest.warns(UserWarning, match="the last save in the background failed too.*No space left"),
    ):
        hf_trainer.train(resume_from_checkpoint=True)
    background_trainer(output, 6, new=False).train(resume_from_checkpoint=True)
    assert names(output) == ["checkpoint-4", "checkpoint-6"] and sound(output / "checkpoint-6")


def killed_in_background(output: Path) -> None:
    """A process that is killed before the checkpoint has its name goes on from the one before, bit-identical."""
    if (child := os.fork()) == 0:
        with before_publishing(4, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            background_trainer(output, 4).train()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert get_last_checkpoint(output) == str(output / "checkpoint-2")
    hf_trainer = background_trainer(output, 4)
    hf_trainer.train(resume_from_checkpoint=True)
    assert names(output) == ["checkpoint-2", "checkpoint-4"]
    plain = trainer(output.with_name("uninterrupted"), 4)
    plain.train()
    same(everything(plain), everything(hf_trainer))


def refused_in_background(output: Path) -> None:
    """A wrong argument."""
    with pytest.raises(ConfigError, match="asynchronous is 'yes', expected True or False"):
        huggingface.attach(trainer(output, 2), asynchronous="yes")  # type: ignore[arg-type]
