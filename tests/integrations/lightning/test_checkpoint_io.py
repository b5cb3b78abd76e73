"""`DSQCheckpointIO` in Lightning's Trainer, on one device: exact resumes, retention, threads, kills, errors."""

from __future__ import annotations

import doctest
import pickle
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.deepspeed_processes import python

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.pytorch.tuner import Tuner

    from dsq_ckpt.integrations.lightning import DSQCheckpointIO, DSQModelParallelStrategy, checkpoint_file
    from tests.integrations.lightning.common import (
        EXACT,
        Frozen,
        Model,
        Stopped,
        damage,
        names,
        same,
        saving,
        seed,
        trained,
        trainer,
    )


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    """Import it when the first test begins: all workers collect this file, and one needs what takes over a second."""
    from lightning.pytorch import callbacks, tuner
    from lightning.pytorch.plugins import io

    from dsq_ckpt.integrations import lightning
    from tests.integrations.lightning import common

    for module in (callbacks, io, tuner, lightning, common):
        for name, value in vars(module).items():
            globals().setdefault(name, value)


def fit(
    io: Any, epochs: int, directory: Path, path: Any = None, callbacks: Any = None, **options: Any
) -> tuple[Any, Model]:
    seed(1)
    model = Model()
    pl_trainer = trainer(io, epochs=epochs, callbacks=callbacks or [saving(directory, **options)])
    pl_trainer.fit(model, ckpt_path=path)
    return pl_trainer, model


def state_of(pl_trainer: Any) -> dict[str, torch.Tensor]:
    return trained(pl_trainer.lightning_module, pl_trainer.optimizers)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[float]]:
    """State and losses of a run of 4 epochs of 6 steps without interruption."""
    pl_trainer, model = fit(TorchCheckpointIO(), 4, tmp_path_factory.mktemp("whole"))
    return state_of(pl_trainer), model.losses


def sound(directory: Path) -> int:
    """Number of visible checkpoints in a directory, all of which are complete and have the right checksums."""
    paths = [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for path in paths:
        with Checkpoint(path) as checkpoint:
            assert not [problem for *_, problem in checkpoint.verify() if problem]
    return len(paths)


@pytest.mark.parametrize("kind", ["epoch", "step", "thread", "link"])
def test_an_exact_resume_is_bit_identical(kind: str, whole: Any, tmp_path: Path) -> None:
    """At the end of an epoch, in its middle, with saves by a thread, and through a link."""
    options: dict[str, Any] = {"save_last": "link" if kind == "link" else True}
    if kind == "step":
        options |= {"every_n_train_steps": 4, "save_top_k": -1}
    new_io = (lambda: AsyncCheckpointIO(DSQCheckpointIO(EXACT))) if kind == "thread" else lambda: DSQCheckpointIO(EXACT)
    fit(new_io(), 2, tmp_path, **options)
    path = tmp_path / "epoch=1-step=8.ckpt" if kind == "step" else "last"
    expected, losses = whole[0], whole[1][12:]
    if kind == "step":  # Lightning begins such an epoch again with the first batch
        (tmp_path / "plain.ckpt").write_bytes(checkpoint_file(path).getvalue())
        plain, model = fit(TorchCheckpointIO(), 4, tmp_path / ".plain", tmp_path / "plain.ckpt")
        expected, losses = state_of(plain), model.losses
        (tmp_path / "plain.ckpt").unlink()
    pl_trainer, model = fit(new_io(), 4, tmp_path, path, **options)
    assert same(state_of(pl_trainer), expected)
    assert model.losses == losses
    assert (tmp_path / "last.ckpt").is_symlink() == (kind == "link")
    assert sound(tmp_path) == (8 if kind == "step" else 2)  # a version of step 12 beside the first


@pytest.mark.parametrize("threaded", [False, True])
def test_retention(threaded: bool, tmp_path: Path) -> None:
    """Two callbacks in one directory keep what they are to keep; each is a delta, complete, and may be resumed from."""
    results: list[dsq_ckpt.SaveResult] = []
    io = DSQCheckpointIO(on_save=results.append)
    callbacks = [
        saving(tmp_path, monitor="val", save_top_k=2, save_last=True, filename="best-{epoch}"),
        saving(tmp_path, every_n_epochs=2, save_weights_only=True, filename="weights-{epoch}"),
    ]
    wrapped = AsyncCheckpointIO(io)
    pace = LambdaCallback(on_train_epoch_start=lambda *_: wrapped._executor and wrapped._executor.submit(int).result())
    pl_trainer, model = fit(wrapped if threaded else io, 6, tmp_path, callbacks=[*callbacks, pace])
    assert names(tmp_path) == ["best-epoch=4.ckpt", "best-epoch=5.ckpt", "last.ckpt", "weights-epoch=5.ckpt"]
    assert sound(tmp_path) == 4
    assert dsq_ckpt.describe(tmp_path / "best-epoch=4.ckpt")["depth"] > 0
    with Checkpoint(tmp_path / "last.ckpt") as checkpoint:  # by the name that it got once it was complete
        assert checkpoint.manifest.parent_name == "best-epoch=5.ckpt"
    assert all(dsq_ckpt.describe(path)["refinement"] == "kept" for path in tmp_path.iterdir())
    assert {result.path.name for result in results} == {
        "last.ckpt", *(f"best-epoch={n}.ckpt" for n in range(6)), *(f"weights-epoch={n}.ckpt" for n in (1, 3, 5))
    }
    weights_checkpoint = io.load_checkpoint(tmp_path / "weights-epoch=5.ckpt")
    assert "optimizer_states" not in weights_checkpoint and weights_checkpoint["hyper_parameters"] == {"width": 64}
    expected = pl_trainer.test(model, verbose=False)  # of what training ended with, as "best" is the last one
    assert pl_trainer.test(model, ckpt_path="best", verbose=False)[0]["val"] == pytest.approx(
        expected[0]["val"], rel=0.01
    )
    again, _ = fit(io, 6, tmp_path, tmp_path / "best-epoch=4.ckpt", callbacks=[saving(tmp_path / "other")])
    assert again.global_step == 36


def test_moments_have_the_names_of_their_weights_and_come_back_by_number(tmp_path: Path) -> None:
    fit(DSQCheckpointIO(), 1, tmp_path)
    path = tmp_path / "epoch=0-step=6.ckpt"
    state: dict[str, Any] = {}
    dsq_ckpt.load(state, path)
    assert {"embed.weight", "net.0.weight", "net.3.weight"} <= state["optimizer_states"]["0"]["state"].keys()
    with Checkpoint(path) as checkpoint:
        assert {"weights/embedding", "exp_avg/embedding/update"} <= checkpoint.manifest.groups.keys()
    assert list(DSQCheckpointIO().load_checkpoint(path)["optimizer_states"][0]["state"]) == list(range(7))


def test_a_thread_removes_nothing_before_the_next_checkpoint_is_complete(tmp_path: Path) -> None:
    io = Stopped()
    wrapped = AsyncCheckpointIO(io)
    state = {"state_dict": {"w": torch.randn(64, 64)}}
    wrapped.save_checkpoint(state, str(tmp_path / "a.ckpt"))
    wrapped.teardown()
    wrapped.save_checkpoint({**state, "waits": True}, str(tmp_path / "b.ckpt"))
    io.begun.wait()
    wrapped.remove_checkpoint(str(tmp_path / "a.ckpt"))
    assert names(tmp_path) == ["a.ckpt"]
    io.goes_on.set()
    wrapped.teardown()
    assert names(tmp_path) == ["b.ckpt"]
    io.save_checkpoint(state, tmp_path / "c.ckpt")
    io.remove_checkpoint(tmp_path / "c.ckpt")  # by the thread that saved it: at once
    assert names(tmp_path) == ["b.ckpt"]


def test_a_run_of_lightnings_own_files_goes_on_and_back(whole: Any, tmp_path: Path) -> None:
    """A file gives way to the directory of its name; a checkpoint becomes a file again."""
    options: dict[str, Any] = {"save_last": True}
    fit(TorchCheckpointIO(), 2, tmp_path, **options)
    assert (tmp_path / "last.ckpt").is_file()
    pl_trainer, _ = fit(DSQCheckpointIO(EXACT), 3, tmp_path, "last", **options)
    assert names(tmp_path) == ["epoch=2-step=18.ckpt", "last.ckpt"] and sound(tmp_path) == 2
    (tmp_path / "plain.ckpt").write_bytes(checkpoint_file(tmp_path / "last.ckpt").getvalue())
    back, _ = fit(TorchCheckpointIO(), 4, tmp_path / "back", tmp_path / "plain.ckpt")
    assert same(state_of(back), whole[0])
    model = Model.load_from_checkpoint(checkpoint_file(tmp_path / "last.ckpt"))
    assert same(model.state_dict(), pl_trainer.lightning_module.state_dict())


def test_names_that_are_taken(tmp_path: Path) -> None:
    """Versions count up, links are replaced and not followed, other directories are refused."""
    for _ in range(2):
        fit(DSQCheckpointIO(EXACT), 1, tmp_path, filename="same", save_last=True)
    assert names(tmp_path) == ["last-v1.ckpt", "last.ckpt", "same-v1.ckpt", "same.ckpt"]
    io, state = DSQCheckpointIO(EXACT), {"state_dict": {"w": torch.ones(3)}, "epoch": 9}
    (tmp_path / "link.ckpt").symlink_to("same.ckpt")
    assert io.load_checkpoint(tmp_path / "link.ckpt")["epoch"] == 0
    io.save_checkpoint(state, tmp_path / "link.ckpt")
    assert not (tmp_path / "link.ckpt").is_symlink() and io.load_checkpoint(tmp_path / "same.ckpt")["epoch"] == 0
    io.save_checkpoint({**state, "epoch": 10}, tmp_path / "link.ckpt")
    assert io.load_checkpoint(tmp_path / "link.ckpt")["epoch"] == 10
    (tmp_path / "mine.ckpt").mkdir()
    (tmp_path / "mine.ckpt" / "notes.txt").write_text("keep")
    with pytest.raises(dsq_ckpt.SaveFailed, match="holds other files"):
        io.save_checkpoint(state, tmp_path / "mine.ckpt")
    assert names(tmp_path / "mine.ckpt") == ["notes.txt"]
    io.save_checkpoint(state, tmp_path / "other" / "same.ckpt")
    (tmp_path / "elsewhere.ckpt").symlink_to(tmp_path / "other" / "same.ckpt")
    assert io.load_checkpoint(tmp_path / "elsewhere.ckpt")["epoch"] == 9, "not the one of that name beside the link"
    with pytest.warns(UserWarning, match="holds checkpoints itself"):
        io.remove_checkpoint(tmp_path / "other")
    assert io.load_checkpoint(tmp_path / "other" / "same.ckpt")["epoch"] == 9
    (tmp_path / "elsewhere.ckpt").unlink()
    (tmp_path / "to-same.ckpt").symlink_to("same.ckpt")
    io.remove_checkpoint(tmp_path / "to-same.ckpt")
    io.remove_checkpoint(tmp_path / "same-v1.ckpt")
    io.remove_checkpoint(tmp_path / "same-v1.ckpt")  # as Lightning's own: nothing is there any more
    assert "same.ckpt" in names(tmp_path) and "same-v1.ckpt" not in names(tmp_path)


def test_averaged_weights_and_other_tensors(tmp_path: Path) -> None:
    """Both models of `WeightAveraging` are weights; tensors of callbacks and odd nestings come back as they were."""
    io = DSQCheckpointIO(EXACT)
    averaging = WeightAveraging(avg_fn=lambda average, value, count: average + (value - average) * 0.5)
    pl_trainer, _ = fit(io, 2, tmp_path, callbacks=[saving(tmp_path), averaging])
    checkpoint = io.load_checkpoint(tmp_path / "epoch=1-step=12.ckpt")
    assert same(checkpoint["current_model_state"], pl_trainer.lightning_module.state_dict()) or same(
        checkpoint["state_dict"], pl_trainer.lightning_module.state_dict()
    )
    assert not torch.equal(checkpoint["current_model_state"]["embed.weight"], checkpoint["state_dict"]["embed.weight"])
    odd = {
        "state_dict": {"w": torch.randn(65, 64), "tied": None, "extra": {"deep": torch.ones(2), 3: (torch.ones(1),)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(65, 64), "list": [torch.ones(1)]}}, "own": 1}, {}],
        "callbacks": {1: torch.randn(70, 70)[3:4], None: {}, "empty": []}, "n": 1 << 80, "x": float("inf"),
    }
    odd["state_dict"]["tied"] = odd["state_dict"]["w"]
    io.save_checkpoint(odd, tmp_path / "odd.ckpt")
    loaded = io.load_checkpoint(tmp_path / "odd.ckpt", map_location="meta")
    assert loaded["state_dict"]["w"].is_meta
    loaded = io.load_checkpoint(tmp_path / "odd.ckpt")
    assert str(loaded) == str(odd) and torch.equal(loaded["state_dict"]["w"], odd["state_dict"]["w"])
    assert torch.equal(loaded["callbacks"][1], odd["callbacks"][1])
    for states in ({"adam": odd["optimizer_states"][0]}, None):  # of a hook that rearranged them
        io.save_checkpoint({**odd, "optimizer_states": states}, tmp_path / "odd.ckpt")
        assert str(io.load_checkpoint(tmp_path / "odd.ckpt")["optimizer_states"]) == str(states)


def test_the_example_of_its_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(DSQCheckpointIO, module=False, globs={"torch": torch})
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert example.examples and "".join(report) == ""


def test_errors(tmp_path: Path) -> None:
    """Each names the value or file, and what to do; nothing is left."""
    io, weights = DSQCheckpointIO(EXACT), {"state_dict": {"w": torch.randn(64, 64)}}
    for value, text in [
        ({"hyper_parameters": {"net": Model}}, "'hyper_parameters.net' is of class"),
        ({"callbacks": {"C": [lambda: 1]}}, "'callbacks.C.0' is of class builtins.function"),
        ({"lr": np.float32(0.1)}, "'lr' is of class numpy.float32"),
        ({"n": {Namespace: 1}}, "'n.<class 'argparse.Namespace'>' is of class"),
        ({"state_dict": {"w": torch.ones(3).to_sparse()}}, "'state_dict.w' has the layout"),
        ({"state_dict": {"w": torch.ones(3, device="meta")}}, "'state_dict.w' is on the meta device"),
    ]:
        with pytest.raises(dsq_ckpt.SaveFailed, match=text):
            io.save_checkpoint({**weights, **value}, tmp_path / "bad.ckpt")
    with pytest.raises(dsq_ckpt.ConfigError, match="storage_options is 1"):
        io.save_checkpoint(weights, tmp_path / "bad.ckpt", storage_options=1)
    assert names(tmp_path) == []

    path = tmp_path / "good.ckpt"
    io.save_checkpoint({**weights, "lr": [np.float64(0.1)], "names": {"a": np.str_("b")}}, path)
    checkpoint = io.load_checkpoint(path)
    assert (checkpoint["lr"], type(checkpoint["lr"][0]), checkpoint["names"]) == ([0.1], float, {"a": "b"})
    allowed = {**weights, "hyper_parameters": {"args": Namespace(lr=1)}}
    with torch.serialization.safe_globals([Namespace]):
        io.save_checkpoint(allowed, path)
        assert io.load_checkpoint(path)["hyper_parameters"] == {"args": Namespace(lr=1)}
    with pytest.raises(dsq_ckpt.LoadFailed, match="add_safe_globals"):
        io.load_checkpoint(path)
    with pytest.raises(dsq_ckpt.ConfigError, match="map_location"):
        io.load_checkpoint(path, map_location={"cuda": "cpu"})
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "missing.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(dsq_ckpt.CheckpointNotFound, match=r"empty\.ckpt"):
        io.load_checkpoint(tmp_path / "empty.ckpt")
    dsq_ckpt.save(weights, tmp_path / "foreign.ckpt")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"foreign\.ckpt.*not saved by Lightning"):
        io.load_checkpoint(tmp_path / "foreign.ckpt")
    io.save_checkpoint(weights, path)
    damage(path)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"good\.ckpt"):
        io.load_checkpoint(path)
    (path / "manifest.json").write_text("{")
    io.remove_checkpoint(path)
    assert not path.exists()
    with pytest.raises(dsq_ckpt.ConfigError, match="preset"):
        DSQCheckpointIO("no-such-preset")
    for adapter in (DSQCheckpointIO, DSQModelParallelStrategy):
        with pytest.raises(dsq_ckpt.ConfigError, match="on_save is 'print', expected a function"):
            adapter(on_save="print")


def test_a_killed_save_is_invisible(whole: Any, tmp_path: Path) -> None:
    """A checkpoint that has its name is complete, and training goes on from it with `ckpt_path="last"`."""
    cases = {
        "committing": ("open", r"\.epoch=1.*manifest\.json"), "naming": ("os.rename", r"\.epoch=1[^/]*$"),
        "replacing": ("os.rename", r"\.last[^/]*$"),
    }
    fit(TorchCheckpointIO(), 1, tmp_path / "replacing", save_last=True)  # a file, which has another name for a moment
    told = [str(argument) for name, case in cases.items() for argument in (*case, tmp_path / name)]
    python(Path(__file__).parent / "workers" / "killed.py", *told)
    for name in cases:
        directory = tmp_path / name
        assert [name for name in names(directory) if name.startswith(".")], "it was killed within a save"
        sound(directory)
        pl_trainer, _ = fit(DSQCheckpointIO(EXACT), 4, directory, "last", save_last=True)
        assert same(state_of(pl_trainer), whole[0])
        assert ("last-replaced-" in pl_trainer.ckpt_path) == (name == "replacing")
        dsq_ckpt.storage.gc.collect_garbage(directory, min_age_seconds=0)
        assert not [name for name in names(directory) if name.startswith(".")]


@pytest.mark.filterwarnings("error:.*was not removed")
def test_object_stores(bucket: str, whole: Any) -> None:
    """`dirpath` is a URL; retention and an exact resume are as on a disk."""
    directory: Any = f"{bucket}/run"
    alone = {"system": "exact", "delta": {"enabled": False}}  # else older ones stay for what newer ones need of them
    fit(DSQCheckpointIO(alone), 2, directory, save_last=True)
    pl_trainer, _ = fit(DSQCheckpointIO(alone), 4, directory, f"{directory}/last.ckpt", save_last=True)
    assert same(state_of(pl_trainer), whole[0])
    system = pl_trainer.checkpoint_callback._fs
    system.invalidate_cache()
    files = sorted(path.rpartition("/")[2] for path in system.ls(f"{directory}"))
    assert files == ["epoch=3-step=24.ckpt", "last.ckpt"]
    again, _ = fit(DSQCheckpointIO(EXACT), 4, directory, "last", save_last=True)
    assert again.global_step == 24


@pytest.mark.parametrize("threaded", [False, True])
def test_frozen_weights_and_buffers_are_exact(threaded: bool, tmp_path: Path) -> None:
    """Trained layers are not; of two Trainers that have the plugin, the one that runs is asked."""
    io = DSQCheckpointIO()
    plugin = AsyncCheckpointIO(io) if threaded else io
    for width in (32, 64):
        seed(1)
        model = Frozen() if width == 64 else Model(width)
        pl_trainer = trainer(plugin, epochs=2, callbacks=[saving(tmp_path / str(width))])
        pl_trainer.fit(model)
    state_dict = torch.load(checkpoint_file(next((tmp_path / "64").glob("*.ckpt"))), weights_only=True)["state_dict"]
    assert {name for name, value in model.state_dict().items() if not value.equal(state_dict[name])} == {
        "embed.weight", "net.0.weight", "net.3.weight"
    }
    assert all(value.equal(state_dict[name]) for name, value in model.kept().items())


def test_frozen_weights_do_not_drift_over_restarts(tmp_path: Path) -> None:
    seed(1)
    first, path = Frozen().kept(), None
    for epochs in range(1, 4):
        seed(1)
        model = Frozen()
        trainer(DSQCheckpointIO(), epochs=epochs, callbacks=[saving(tmp_path, save_last=True)]).fit(
            model, ckpt_path=path
        )
        path = "last"
    assert same(model.kept(), first)


def test_the_tuner_takes_back_all_that_it_tried(tmp_path: Path) -> None:
    """Its file goes, and a save after it is a keyframe of its own."""
    seed(1)
    model = Frozen()
    model.lr = 1e-3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pl_trainer = trainer(DSQCheckpointIO(), callbacks=[saving(tmp_path)], default_root_dir=tmp_path)
    Tuner(pl_trainer).lr_find(model, num_training=12)
    assert same(dict(model.state_dict()), before)
    assert not list(tmp_path.rglob(".lr_find*"))
    pl_trainer.fit(model)
    assert sound(tmp_path) == 1


def test_a_plugin_can_be_given_to_a_process_that_is_spawned(tmp_path: Path) -> None:
    io = pickle.loads(pickle.dumps(DSQCheckpointIO(EXACT, pinned=False)))
    assert io.config == DSQCheckpointIO(EXACT).config and not io.pinned
    fit(io, 1, tmp_path)
    assert sound(tmp_path) == 1
