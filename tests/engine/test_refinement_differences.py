"""Refinement of weights as the difference to the layer before: the same values in fewer bytes."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine import retention
from dsq_ckpt.engine.back_off import BackOff
from dsq_ckpt.quantization import restored_values
from dsq_ckpt.report.history import History
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.checkpoint_copy import copy_checkpoints
from dsq_ckpt.storage.description import list_linked_refinement
from dsq_ckpt.storage.gc import find_garbage
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import independent_reader as independent
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.states import flat_tensors, load_copy, to_bytes

SAVES = 9


def states(count=SAVES, dtype=torch.float32):
    """A weight that moves by parts of its cells, with Adam's moments."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    for number in range(count):
        yield {
            "w": weight.to(dtype), "optimizer": {"state": {0: {
                "step": torch.tensor(float(number)), "exp_avg": torch.randn(96, 128, generator=generator) * 1e-3,
                "exp_avg_sq": torch.rand(96, 128, generator=generator) * 1e-6,
            }}},
        }
        weight = weight + torch.randn(96, 128, generator=generator) * 0.004


def save_all(run, count=SAVES, history=None, threads=1, **refinement):
    """Save all states in a row; return their paths."""
    history = history or dsq_ckpt.SaveHistory()
    config = {"refinement": refinement, "storage": {"threads": threads}}
    paths = []
    for number, state in enumerate(states(count)):
        paths.append(run / f"{number:03d}")
        dsq_ckpt.save(state, paths[-1], config=config, history=history)
    return paths


def loaded(path):
    [like] = states(1)
    return {name: to_bytes(value) for name, value in flat_tensors(load_copy(path, like)).items()}


def roles(path, role="older_refinement"):
    return [file.name for file in Manifest.read(path).files if file.role == role]


def written(path):
    return Manifest.read(path).kinds["weights"].refinement


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without differences: what each of its checkpoints holds, by path."""
    # Each test begins like this, but only after this fixture; loads of other modules would give moments finer parts.
    restored_values._loads = restored_values.LoadCounts()
    paths = save_all(tmp_path_factory.mktemp("plain"), keep_last=SAVES, max_differences=0)
    return {path: loaded(path) for path in paths}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("most", [1, 3])
def test_values_are_the_same_in_fewer_bytes(tmp_path, plain, most, threads):
    paths = save_all(tmp_path / "run", keep_last=SAVES, max_differences=most, threads=threads)
    for number, (path, (other, values)) in enumerate(zip(paths, plain.items(), strict=True)):
        assert loaded(path) == values
        assert len(roles(path)) == bool(number % (most + 1)) and roles(other) == []
        full = number % (most + 1) == 0
        assert written(path) == written(other) if full else written(path) < 0.8 * written(other)
        reader = independent.Reader(path)
        assert reader.tensor("w", True) == values["w"]


def test_each_needs_none_of_the_others(tmp_path):
    """Older directories are removed, and the refinement of older checkpoints is dropped."""
    paths = save_all(tmp_path / "run", max_differences=3)
    expected = [loaded(path) for path in paths[-3:]]
    for path in paths[:-3]:
        manifest = Manifest.read(path)
        assert manifest.refinement == "dropped" and not list(path.glob("*.refinement"))
        assert {file.role for file in manifest.files} <= {"own", "ancestor", "index"}
        shutil.rmtree(path)
    for path, values in zip(paths[-3:], expected, strict=True):
        assert loaded(path) == values
        with Checkpoint(path) as checkpoint:
            assert [problem for _, _, problem in checkpoint.verify() if problem] == []
        assert list(find_garbage(path.parent, min_age_seconds=0)) == []


@pytest.mark.parametrize("count", [4, 7, 8])
def test_what_is_kept_counts_linked_layers(tmp_path, count):
    paths = save_all(tmp_path / "run", count, max_differences=3)
    manifests = [Manifest.read(path) for path in paths]
    linked = {file.name for file in list_linked_refinement(manifests)}
    full = (count - 1) // 4 * 4  # the newest that is stored in full
    assert linked == ({f"{manifests[full].save_id}-00000.refinement"} if full < count - 3 else set())
    total = History.read(tmp_path / "run").total
    files = {file.stat().st_ino: file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert total["everything"].kept == sum(files.values())
    sizes = [manifest.kinds["weights"] for manifest in manifests]
    layers = {*range(count - 3, count), full}
    assert total["weights"].kept == sum(kind.base for kind in sizes) + sum(sizes[index].refinement for index in layers)


def test_a_resumed_run_begins_with_a_full_layer(tmp_path):
    paths = save_all(tmp_path / "run", 3, max_differences=3)
    history = dsq_ckpt.SaveHistory()
    state = list(states(4))[-1]
    dsq_ckpt.load(dict(state), paths[-1], history=history)
    dsq_ckpt.save(state, tmp_path / "run" / "later", history=history, config={"refinement": {"max_differences": 3}})
    assert Manifest.read(tmp_path / "run" / "later").depth == 3 and roles(tmp_path / "run" / "later") == []


def save_moving(run, moves, history=None, stage=None, overwrite=False, **refinement):
    """Save a weight that moves by these parts of its deviation; return which saves are differences, and begin rows."""
    generator = torch.Generator().manual_seed(0)
    history = history or dsq_ckpt.SaveHistory()
    config = {"refinement": refinement, **({"storage": {"stage": stage}} if stage else {})}
    still, moving = torch.randn(64, 64, generator=generator), torch.randn(512, 128, generator=generator)
    differences, rows = [], []
    for number, move in enumerate(moves):
        moving = moving + move * torch.randn(512, 128, generator=generator)
        path, state = run / ("same" if overwrite else f"{number:03d}"), {"still": still, "moving": moving}
        if stage:
            dsq_ckpt.async_save(state, path, config=config, history=history).result()
        else:
            dsq_ckpt.save(state, path, config=config, history=history, overwrite=overwrite)
        differences += [number] if roles(path) else []
        rows += [number] if history.find(Manifest.read(path).save_id).cache.refinement else []
    return differences, rows


@pytest.mark.parametrize("how", [{}, {"stage": "copy"}, {"stage": "quantize"}, {"overwrite": True}])
def test_differences_that_save_little_are_tried_less_and_less_often(tmp_path, how):
    """The older file that they keep on the disk is larger than what they save."""
    differences, rows = save_moving(tmp_path, [0.2] * (10 if how else 54), **how)
    assert rows == [0, 3, 8, 17, 34, 51][: len(rows)] and differences == [number + 1 for number in rows]
    assert len(rows) == (3 if how else 6)


def test_a_difference_that_saves_enough_ends_the_wait(tmp_path):
    moves = [0.2] * 9 + [0.02] * 2 + [0.2] * 6
    assert save_moving(tmp_path, moves)[1] == [0, 3, 8, 10, 13]


def test_layers_of_other_bits_are_no_miss(tmp_path):
    """They cannot be compared, and a row begins with the next one."""
    history = dsq_ckpt.SaveHistory()
    for number, state in enumerate(states(4)):
        config = {"quantize": {"weights": {"refinement_bits": 5 if number == 1 else 4}}}
        dsq_ckpt.save(state, tmp_path / str(number), config=config, history=history)
        assert history.find(Manifest.read(tmp_path / str(number)).save_id).cache.back_off == BackOff()
    assert [number for number in range(4) if roles(tmp_path / str(number))] == [3]


def test_a_row_ends_where_its_next_difference_saves_little(tmp_path):
    """A later difference that saves little is no miss, as the first one of its row saved enough."""
    assert save_moving(tmp_path, [0.02, 0.02, 0.2, 0.02], max_differences=3) == ([1, 2], [0, 1, 3])


@pytest.mark.parametrize("lost", ["dropped", "removed", "shortened"])
def test_a_parent_that_lost_its_refinement(tmp_path, lost):
    """Another job may drop it, and a user may delete a file: the next layer is full, and the save goes on."""
    history, run = dsq_ckpt.SaveHistory(), tmp_path / "run"
    path = save_all(run, 3, history, max_differences=8)[-1]
    [name] = roles(path, "refinement")
    if lost == "dropped":
        manifest = Manifest.read(path)
        files = [file for file in manifest.files if "refinement" not in file.role]
        manifest.model_copy(update={"refinement": "dropped", "files": files}).write(path, exclusive=False, fsync=False)
    if lost != "shortened":
        (path / name).unlink()
    else:
        data = (path / name).read_bytes()
        (path / name).unlink()
        (path / name).write_bytes(data[:-1])
    state = list(states(4))[-1]
    dsq_ckpt.save(state, run / "003", config={"refinement": {"max_differences": 8}}, history=history)
    assert Manifest.read(run / "003").depth == 3 and roles(run / "003") == []
    error = (load_copy(run / "003", state)["w"] - state["w"]).norm() / state["w"].norm()
    assert error < 0.03


def test_a_damaged_older_layer_is_found_by_the_next_save_and_named_by_a_load(tmp_path, recwarn):
    history, run = dsq_ckpt.SaveHistory(), tmp_path / "run"
    path = save_all(run, 3, history, max_differences=100)[-1]
    name = roles(path)[0]
    data = bytearray((path / name).read_bytes())
    data[len(data) // 3] ^= 1
    (path / name).write_bytes(data)  # all its links
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=name):
        loaded(path)
    for number in range(3, 9):  # each save checks a quarter of the files
        config = {"refinement": {"max_differences": 100}}
        dsq_ckpt.save(next(states(1)), run / f"{number:03d}", config=config, history=history)
        if Manifest.read(run / f"{number:03d}").depth == 0:
            break
    assert number < 8 and roles(run / f"{number:03d}") == []
    assert any(name in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("keyframe", [False, True])
def test_a_merged_checkpoint_needs_no_older_layer(tmp_path, keyframe):
    path = save_all(tmp_path / "run", 4, max_differences=3)[-1]
    assert len(roles(path)) == 1
    dsq_ckpt.merge(path, tmp_path / "merged", keyframe=keyframe)
    assert roles(tmp_path / "merged") == [] and bool(roles(tmp_path / "merged", "ancestor")) == (not keyframe)
    shutil.rmtree(tmp_path / "run")
    assert loaded(tmp_path / "merged")["w"] == independent.Reader(tmp_path / "merged").tensor("w", True)
    expected = save_all(tmp_path / "plain", 4, max_differences=0)[-1]
    assert loaded(tmp_path / "merged") == loaded(expected)


def test_a_copy_by_hard_links_is_told_from_a_link_to_its_layer(tmp_path):
    """A run that goes back links the same files; only the copy keeps the original's refinement."""
    paths = save_all(tmp_path / "run", 3, max_differences=8, keep_last=2)
    history = dsq_ckpt.SaveHistory()
    state = list(states(6))
    dsq_ckpt.load(dict(state[3]), paths[-1], history=history)
    for number in range(3, 6):
        dsq_ckpt.save(
            state[number], tmp_path / "run" / f"{number:03d}", history=history,
            config={"refinement": {"max_differences": 8, "keep_last": 2}},
        )
    kept = [path.name for path in sorted((tmp_path / "run").iterdir()) if Manifest.read(path).refinement == "kept"]
    assert kept == ["004", "005"]


def test_older_layers_are_in_other_ways_to_save(tmp_path):
    """In the background, from a copy or from codes, and when the checkpoint is replaced by the next one."""
    for stage in ("copy", "quantize"):
        history = dsq_ckpt.SaveHistory()
        for number, state in enumerate(states(3)):
            path = tmp_path / stage / str(number)
            config = {"refinement": {"max_differences": 3}, "storage": {"stage": stage}}
            dsq_ckpt.async_save(state, path, history=history, config=config).result()
            assert len(roles(path)) == bool(number)
            assert (load_copy(path, state)["w"] - state["w"]).norm() < 0.03 * state["w"].norm()
    history = dsq_ckpt.SaveHistory()
    for number, state in enumerate(states(3)):
        config = {"refinement": {"max_differences": 3}}
        dsq_ckpt.save(state, tmp_path / "same", history=history, overwrite=True, config=config)
        assert len(roles(tmp_path / "same")) == bool(number)
        expected = (load_copy(tmp_path / "same", state)["w"] - state["w"]).norm() / state["w"].norm()
        assert expected < 0.03


@pytest.mark.parametrize("problem", ["it is dropped meanwhile", "no links"])
def test_a_layer_that_cannot_be_linked_is_not_needed(tmp_path, monkeypatch, problem):
    """Another job may drop the parent's refinement; a copy would take more bytes than differences save."""
    history, run = dsq_ckpt.SaveHistory(), tmp_path / "run"
    path = save_all(run, 2, history, max_differences=3)[-1]
    link = os.link

    def refuse(source, target, **options):
        if str(source).endswith(".refinement"):
            if problem == "no links":
                raise PermissionError(errno.EPERM, "Operation not permitted")
            retention._drop_refinement(path, Manifest.read(path), False)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", refuse)
    state = list(states(3))[-1]
    dsq_ckpt.save(state, run / "002", history=history, config={"refinement": {"max_differences": 3}})
    assert roles(run / "002") == [] and len(list((run / "002").glob("*.refinement"))) == 1
    assert (load_copy(run / "002", state)["w"] - state["w"]).norm() < 0.03 * state["w"].norm()


def test_links_that_no_difference_needs_are_removed(tmp_path):
    """Weights that moved too far are stored in full, and begin a row with the next save."""
    history, run = dsq_ckpt.SaveHistory(), tmp_path / "run"
    save_all(run, 2, history, max_differences=3)
    [state] = states(1)
    for number in range(2, 5):
        moved = {**state, "w": state["w"].roll(int(number == 2), 0)}
        config = {"refinement": {"max_differences": 3}}
        dsq_ckpt.save(moved, run / f"{number:03d}", history=history, config=config)
        files = {file.name for file in (run / f"{number:03d}").iterdir()}
        assert files == {"manifest.json", *(file.name for file in Manifest.read(run / f"{number:03d}").files)}
    assert [len(roles(run / f"{number:03d}")) for number in range(5)] == [0, 1, 0, 0, 1]


def test_nothing_depends_on_what_a_load_found_damaged(tmp_path):
    history, run = dsq_ckpt.SaveHistory(), tmp_path / "run"
    paths = save_all(run, 2, history, max_differences=3)
    file = paths[0] / roles(paths[0], "refinement")[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    state = list(states(3))[-1]
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
        dsq_ckpt.load(dict(state), paths[1], history=history)
    dsq_ckpt.save(state, run / "002", history=history, config={"refinement": {"max_differences": 3}})
    assert roles(run / "002") == []
    assert (load_copy(run / "002", state)["w"] - state["w"]).norm() < 0.03 * state["w"].norm()


def test_where_one_checkpoint_keeps_its_refinement_it_is_in_full(tmp_path):
    paths = save_all(tmp_path / "run", 3, keep_last=1)
    assert [roles(path) for path in paths] == [[], [], []]


def test_sizes_of_a_merged_checkpoint_are_those_of_full_layers(tmp_path):
    path = save_all(tmp_path / "run", 3, max_differences=3)[-1]
    dsq_ckpt.merge(path, tmp_path / "merged", keyframe=True)
    full = Manifest.read(save_all(tmp_path / "plain", 3, max_differences=0)[-1]).kinds
    merged = Manifest.read(tmp_path / "merged").kinds
    assert {kind: sizes.refinement for kind, sizes in merged.items()} == {
        kind: sizes.refinement for kind, sizes in full.items()
    }


def test_copies_of_a_run_link_older_layers_once(tmp_path):
    paths = save_all(tmp_path / "run", 6, max_differences=3)
    copy_checkpoints(tmp_path / "run", tmp_path / "copy")
    for path in paths[-3:]:
        assert loaded(tmp_path / "copy" / path.name) == loaded(path)
    sizes = [
        sum({file.stat().st_ino: file.stat().st_size for file in run.rglob("*.refinement")}.values())
        for run in (tmp_path / "run", tmp_path / "copy")
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("change", [
    {"storage": {"block_elements": 1 << 16}, "refinement": {"max_differences": 3}},
    {"quantize": {"weights": {"refinement_bits": 5}}, "refinement": {"max_differences": 3}},
    {"refinement": {"max_differences": 0}}, {"quantize": {"weights": {"refinement_bits": 0}}},
], ids=["blocks", "bits", "none", "no refinement"])
def test_settings_that_change_between_saves(tmp_path, change):
    history = dsq_ckpt.SaveHistory()
    for number, state in enumerate(states(4)):
        path = tmp_path / "run" / str(number)
        config = change if number == 2 else {"refinement": {"max_differences": 3}}
        dsq_ckpt.save(state, path, config=config, history=history)
        assert bool(roles(path)) == (number == 1)
        error = (load_copy(path, state)["w"] - state["w"]).norm() / state["w"].norm()
        assert error < (0.03 if Manifest.read(path).kinds["weights"].refinement else 0.3)


@pytest.mark.parametrize("name", ["../{}.dsq", "{}.refinement", "{}"])
def test_a_forged_name_of_the_older_layer_is_refused(tmp_path, name):
    path = save_all(tmp_path / "run", 2)[-1]
    [older] = roles(path)

    def edit(contents):
        for entry in contents["records"].values():
            if "older" in entry:
                entry["older"][0] = name.format(older.removesuffix(".refinement"))

    edit_contents(path, edit, suffix="refinement")
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match="not to a base file"):
        loaded(path)
