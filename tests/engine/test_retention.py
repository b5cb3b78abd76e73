"""Refinements of older checkpoints are dropped, while a trainer may be removing the checkpoints that they are of."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine import removed_ancestors, retention
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.gc import collect_garbage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.predecessors import iter_predecessors
from tests.helpers.new_process import begin_new_process
from tests.helpers.states import flat_tensors, mixed_state

EXACT = {"quantize": {kind: {"method": "exact"} for kind in ("weights", "exp_avg", "exp_avg_sq", "momentum")}}


def save_two(run, count=2):
    """Return the directories of checkpoints of one state, whose refinements are all there."""
    config = DSQConfig.model_validate({"refinement": {"keep_last": 100}, "storage": {"fsync": False}})
    paths = [run / f"step-{number}" for number in range(count)]
    for path in paths:
        dsq_ckpt.save(mixed_state(), path, config=config)
    return paths


@pytest.mark.parametrize("gone", ["directory", "manifest"])
def test_a_checkpoint_that_is_removed_meanwhile_does_not_come_back(tmp_path, monkeypatch, gone):
    """Its manifest was written again into a directory that was being emptied, and named files that are not there."""
    older, newest = save_two(tmp_path)
    exchange = retention.exchange_names

    def after_removal(*names):
        shutil.rmtree(older) if gone == "directory" else (older / MANIFEST).unlink()
        return exchange(*names)

    monkeypatch.setattr(retention, "exchange_names", after_removal)
    assert retention.drop_refinements(newest, 1, False) == []
    assert not (older / MANIFEST).exists() and older.exists() == (gone == "manifest")
    assert sorted(os.listdir(tmp_path)) == sorted({older.name, newest.name} & set(os.listdir(tmp_path)))
    dsq_ckpt.load({}, newest)


def test_a_checkpoint_that_is_replaced_meanwhile_stays(tmp_path, monkeypatch):
    """Its manifest came to be that of the one before, whose files are gone."""
    older, newest = save_two(tmp_path)
    exchange, state = retention.exchange_names, mixed_state(seed=1)

    def after_another_save(*names):
        monkeypatch.setattr(retention, "exchange_names", exchange)
        dsq_ckpt.save(state, older, overwrite=True, parent=None)
        return exchange(*names)

    monkeypatch.setattr(retention, "exchange_names", after_another_save)
    assert retention.drop_refinements(newest, 1, False) == []
    assert Manifest.read(older).refinement == "kept"
    dsq_ckpt.load({}, older)
    assert sorted(os.listdir(tmp_path)) == [older.name, newest.name]


def test_who_empties_the_directory_meets_no_new_name(tmp_path):
    """Else `shutil.rmtree` fails in the trainer, as the directory is not empty when it comes to remove it."""
    config = DSQConfig.model_validate({"storage": {"fsync": False}})
    dsq_ckpt.save(mixed_state(), tmp_path / "original", config=config)
    manifest = Manifest.read(tmp_path / "original")
    for number in range(200):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", run / "step-1")
        begin, failed = threading.Barrier(2), []

        def remove(begin=begin, path=run / "step-1", failed=failed):
            names = sorted(os.listdir(path))
            begin.wait()
            try:
                for name in names:
                    (path / name).unlink(missing_ok=True)
                path.rmdir()
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=remove)
        thread.start()
        begin.wait()
        retention._drop_refinement(run / "step-1", manifest, False)
        thread.join()
        assert not failed and os.listdir(run) == []


def test_a_checkpoint_that_each_save_replaces_is_passed_over(tmp_path):
    """As `last` beside one for each epoch: their refinement was kept for good, as the way to them was lost."""
    config = DSQConfig.model_validate({"refinement": {"keep_last": 2}, "storage": {"fsync": False}})
    state = mixed_state()
    for number in range(5):
        state |= {"lossy": {name: 1.01 * weights for name, weights in state["lossy"].items()}}
        dsq_ckpt.save(state, tmp_path / f"step-{number}", config=config)
        dsq_ckpt.save(state, tmp_path / "last", config=config, overwrite=True)
    names = {path.name for path in tmp_path.iterdir() if Manifest.read(path).refinement == "kept"}
    assert names == {"last", "step-4"}
    before = [path.name for path, _ in iter_predecessors(tmp_path / "last")]
    assert before == [f"step-{number}" for number in range(4, -1, -1)]
    for path in tmp_path.iterdir():
        dsq_ckpt.load({}, path, refinement=path.name in names)
    shutil.rmtree(tmp_path / "last")
    assert [path.name for path, _ in iter_predecessors(tmp_path / "step-4")] == []


def test_replaced_checkpoints_that_name_each_other_end(tmp_path):
    older, newest = save_two(tmp_path)
    manifest = Manifest.read(older)
    ids = ["0" * 16, "1" * 16]
    replaced = [(ids[0], ids[1], older.name), (ids[1], ids[0], older.name)]
    manifest.model_copy(update={"replaced": replaced}).write(older, exclusive=False, fsync=False)
    last = Manifest.read(newest).model_copy(update={"previous": ids[0]})
    last.write(newest, exclusive=False, fsync=False)
    assert list(iter_predecessors(newest)) == []


def test_the_time_of_its_save_stays(tmp_path):
    older, newest = save_two(tmp_path)
    os.utime(older, (1, 1))
    assert retention.drop_refinements(newest, 1, True) == [older]
    assert older.stat().st_mtime == 1
    assert Manifest.read(older).refinement == "dropped"
    assert not [name for name in os.listdir(older) if name.endswith(".refinement")]
    dsq_ckpt.load({}, older, refinement=False)


def test_files_of_a_killed_process_are_collected(tmp_path, monkeypatch):
    older, newest = save_two(tmp_path)

    def killed(hidden, target):
        shutil.copy(hidden, tmp_path / ".step-0.dsq-01234567.tmp")
        raise KeyboardInterrupt

    monkeypatch.setattr(retention, "exchange_names", killed)
    with pytest.raises(KeyboardInterrupt):
        retention.drop_refinements(newest, 1, False)
    assert [orphan.path.name for orphan in collect_garbage(tmp_path, 0)] == [".step-0.dsq-01234567.tmp"]
    assert Manifest.read(older).refinement == "kept"
    dsq_ckpt.load({}, older)


@pytest.mark.parametrize("length", [237, 238, 255])
def test_a_name_as_long_as_a_file_system_takes(tmp_path, recwarn, length):
    """Hidden files beside the directory were to have longer names."""
    config = DSQConfig.model_validate({"refinement": {"keep_last": 1}, "storage": {"fsync": False}})
    paths = [tmp_path / (str(number) * length) for number in range(2)]
    for path in paths:
        dsq_ckpt.save(mixed_state(), path, config=config)
    assert [Manifest.read(path).refinement for path in paths] == ["dropped", "kept"]
    assert not [warning for warning in recwarn if "not dropped" in str(warning.message)]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in paths]


def test_a_refinement_that_could_not_be_dropped_is_with_the_next_save(tmp_path, monkeypatch):
    """Whichever of several failed: none is behind one that was dropped, where no save looks again."""
    for failing in range(2):
        *older, newest = paths = save_two(tmp_path / str(failing), 4)
        replace, calls = retention._replace_manifest, []

        def full(*given, replace=replace, calls=calls, failing=failing):
            calls.append(given)
            if len(calls) == failing + 1:
                raise OSError(28, "No space left on device")
            return replace(*given)

        monkeypatch.setattr(retention, "_replace_manifest", full)
        with pytest.raises(OSError, match="No space left"):
            retention.drop_refinements(newest, 1, False)
        monkeypatch.undo()
        refinements = [Manifest.read(path).refinement == "kept" for path in older]
        assert refinements == [False] * failing + [True] * (3 - failing)
        assert retention.drop_refinements(newest, 1, False) == older[failing:][::-1]
        assert [Manifest.read(path).refinement for path in paths] == ["dropped"] * 3 + ["kept"]


@pytest.mark.parametrize("source", ["best", "step-1", "alone"])
def test_a_copy_of_hard_links_keeps_its_refinement(tmp_path, source):
    """Also where the run is resumed from it, or from what it is a copy of; a checkpoint without a copy is dropped."""
    paths, best = save_two(tmp_path), tmp_path / "best"
    if source != "alone":
        shutil.copytree(paths[1], best, copy_function=os.link)
    resumed = best if source == "best" else paths[1]
    begin_new_process()
    dsq_ckpt.load(mixed_state(), resumed)
    for number in range(2, 5):
        dsq_ckpt.save(mixed_state(), tmp_path / f"step-{number}", config={"refinement": {"keep_last": 1}})
    assert Manifest.read(tmp_path / "step-2").previous_name == resumed.name
    dropped = {path.name for path in tmp_path.iterdir() if Manifest.read(path).refinement == "dropped"}
    assert dropped == {"step-0", "step-2", "step-3"} | ({"step-1"} if source == "alone" else set())
    if source != "alone":
        for path in (best, paths[1]):
            dsq_ckpt.load({}, path, refinement=True, history=dsq_ckpt.SaveHistory())


def test_what_a_copy_of_hard_links_was_made_of_is_dropped_if_training_goes_on(tmp_path):
    paths = save_two(tmp_path)
    shutil.copytree(paths[1], tmp_path / "best", copy_function=os.link)
    dsq_ckpt.save(mixed_state(), tmp_path / "step-2", config={"refinement": {"keep_last": 1}})
    assert [Manifest.read(path).refinement for path in (*paths, tmp_path / "best")] == ["dropped"] * 2 + ["kept"]


def large_state():
    """Return a state of 3 MB, of which files of removed checkpoints are worth a keyframe."""
    generator = torch.Generator().manual_seed(0)
    state = {"w.weight": torch.randn(512, 512, generator=generator) * 0.02}
    moments = ("exp_avg", "exp_avg_sq")
    return state | {f"state.w.{name}": torch.rand(512, 512, generator=generator) * 1e-4 for name in moments}


@pytest.mark.parametrize("preset", ["exact", "moments_exact"])
def test_a_run_of_one_checkpoint_takes_about_the_disk_of_one(tmp_path, preset):
    """A trainer removes the others, whose files stay while the chain needs them, but no longer than it pays."""
    state = large_state()
    plain = sum(value.nbytes for value in flat_tensors(state).values())
    for number in range(12):
        dsq_ckpt.save(state, tmp_path / str(number), config=preset)
        if number:
            shutil.rmtree(tmp_path / str(number - 1))
        state = {name: value * 1.001 for name, value in state.items()}
        files = {file.stat().st_ino: file.stat().st_size for file in (tmp_path / str(number)).iterdir()}
        assert sum(files.values()) < 1.8 * plain, number


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_base_layers_of_removed_checkpoints_take_about_two_keyframes_at_most(tmp_path, monkeypatch, count):
    """A trainer keeps the last ones of a lossy run; where all stay, the chain goes on."""
    monkeypatch.setattr(removed_ancestors, "_MIN_GAIN", 0)
    generator = torch.Generator().manual_seed(1)
    state, depths, largest = large_state(), [], 0
    for number in range(20):
        path = tmp_path / f"{number:02d}"
        dsq_ckpt.save(state, path, config={"storage": {"fsync": False}})
        manifest = Manifest.read(path)
        depths.append(manifest.depth)
        largest = max(largest, manifest.sum_bytes("own"))
        if number >= count:
            shutil.rmtree(tmp_path / f"{number - count:02d}")
            assert manifest.sum_bytes("ancestor") < 2.5 * largest
        factor = {name: 1 + 0.1 * torch.rand(value.shape, generator=generator) for name, value in state.items()}
        state = {name: value * factor[name] for name, value in state.items()}
    assert (max(depths) == 19) == (count == 20), depths


@pytest.mark.parametrize("apart", [False, True], ids=["one run", "a directory each"])
def test_where_all_checkpoints_stay_exact_chains_go_on(tmp_path, apart):
    state = large_state()
    for number in range(6):
        path = tmp_path / f"run{number if apart else 0}" / str(number)
        parent = (tmp_path / f"run{number - 1}" / str(number - 1)) if apart and number else "auto"
        dsq_ckpt.save(state, path, config="exact", parent=parent)
        state = {name: value * 1.001 for name, value in state.items()}
        assert Manifest.read(path).depth == number


@pytest.mark.parametrize("count", [1, 3])
def test_a_frozen_base_is_not_written_again_where_checkpoints_are_removed(tmp_path, count):
    state = large_state() | {"adapter": torch.zeros(40, 40)}
    for number in range(6):
        dsq_ckpt.save(state, tmp_path / str(number), config="exact")
        assert Manifest.read(tmp_path / str(number)).depth == number
        if number >= count:
            shutil.rmtree(tmp_path / str(number - count))
        state["adapter"] = state["adapter"] + 1e-3


@pytest.mark.parametrize("first_is_there", [True, False])
def test_saves_read_no_more_manifests_as_a_run_without_refinement_grows(tmp_path, monkeypatch, first_is_there):
    """Each save read those of all checkpoints of the run, in search of refinement to drop."""
    reads = []
    read = Manifest.read.__func__
    monkeypatch.setattr(Manifest, "read", classmethod(lambda cls, path: reads.append(path) or read(cls, path)))
    counts = []
    for number in range(12):
        before = len(reads)
        dsq_ckpt.save(mixed_state(), tmp_path / f"step-{number}", config="exact")
        counts.append(len(reads) - before)
        if number == 5:
            retention._settled.clear()  # as in a new process
            if not first_is_there:
                shutil.rmtree(tmp_path / "step-0")
    assert counts[10] == counts[11] and counts[11] <= counts[4], counts


def test_refinement_that_cannot_be_reached_for_a_while_is_dropped_later(tmp_path, monkeypatch):
    """The older part of the run is behind a checkpoint without refinement whose manifest cannot be read."""
    paths = save_two(tmp_path)
    for number in (2, 3):
        paths.append(tmp_path / f"step-{number}")
        dsq_ckpt.save(mixed_state(), paths[-1], config={**EXACT, "refinement": {"keep_last": 100}})
    read = Manifest.read.__func__

    def fail(cls, path):
        if path == paths[1]:
            raise LoadFailed(f"{path}: the network is down")
        return read(cls, path)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", classmethod(fail))
        assert retention.drop_refinements(paths[3], 1, False) == []
    assert retention.drop_refinements(paths[3], 1, False) == [paths[1], paths[0]]


def test_saves_of_two_states_in_one_directory_read_no_more_manifests_either(tmp_path, monkeypatch):
    """Each save read all manifests of its own state, as only that of the other was known to have nothing to drop."""
    reads = []
    read = Manifest.read.__func__
    monkeypatch.setattr(Manifest, "read", classmethod(lambda cls, path: reads.append(path) or read(cls, path)))
    counts, histories = [], [dsq_ckpt.SaveHistory(), dsq_ckpt.SaveHistory()]
    for number in range(24):
        before = len(reads)
        state = {f"weights{number % 2}": torch.zeros(8) + number}
        dsq_ckpt.save(state, tmp_path / f"step-{number}", config="exact", history=histories[number % 2])
        counts.append(len(reads) - before)
    assert counts[-2] == counts[-4] and counts[-1] == counts[-3], counts
    assert len(retention._settled[tmp_path]) == 2


def test_refinement_that_was_restored_from_a_copy_is_dropped_again(tmp_path):
    """The process that dropped it once took it for dropped from then on."""
    config = {"refinement": {"keep_last": 1}, "storage": {"fsync": False}}
    dsq_ckpt.save(mixed_state(), tmp_path / "run" / "step-0", config=config)
    shutil.copytree(tmp_path / "run" / "step-0", tmp_path / "copy")
    dsq_ckpt.save(mixed_state(), tmp_path / "run" / "step-1", config=config)
    assert Manifest.read(tmp_path / "run" / "step-0").refinement == "dropped"
    shutil.rmtree(tmp_path / "run" / "step-0")
    shutil.copytree(tmp_path / "copy", tmp_path / "run" / "step-0")
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load(mixed_state(), tmp_path / "run" / "step-0", history=history)
    for number in (2, 3):
        dsq_ckpt.save(mixed_state(), tmp_path / "run" / f"step-{number}", config=config, history=history)
    refinements = [Manifest.read(tmp_path / "run" / f"step-{number}").refinement for number in (0, 2, 3)]
    assert refinements == ["dropped", "dropped", "kept"]


def test_refinement_that_a_copy_of_hard_links_kept_is_dropped_once_the_copy_is_gone(tmp_path):
    """The checkpoint that a run without refinement layers was resumed from."""
    paths, best = save_two(tmp_path), tmp_path / "best"
    shutil.copytree(paths[1], best, copy_function=os.link)
    begin_new_process()
    dsq_ckpt.load(mixed_state(), paths[1])
    for number in (2, 3):
        dsq_ckpt.save(mixed_state(), tmp_path / f"step-{number}", config={**EXACT, "refinement": {"keep_last": 1}})
    assert [Manifest.read(path).refinement for path in paths] == ["dropped", "kept"]
    shutil.rmtree(best)
    assert retention.drop_refinements(tmp_path / "step-3", 1, False) == [paths[1]]


def test_refinement_whose_manifest_could_not_be_compared_is_dropped_later(tmp_path, monkeypatch):
    """The refinement is behind a checkpoint without any."""
    older, newest = save_two(tmp_path), tmp_path / "step-3"
    for path in (tmp_path / "step-2", newest):
        dsq_ckpt.save(mixed_state(), path, config={**EXACT, "refinement": {"keep_last": 100}})
    with monkeypatch.context() as patch:
        patch.setattr(retention, "_is_unchanged", lambda *_: False)
        assert retention.drop_refinements(newest, 1, False) == []
    assert retention.drop_refinements(newest, 1, False) == older[::-1]
