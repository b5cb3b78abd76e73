"""Chains of codes merged into a keyframe, or one delta against theirs: the same values, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.fixtures import make_format_v1 as v1
from tests.fixtures import make_format_v2 as v2
from tests.fixtures import make_format_v3 as v3
from tests.fixtures import make_format_v4 as v4
from tests.helpers import independent_reader as independent
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.lc import CONFIG as DIFFERENCES
from tests.helpers.states import find_differences, flat_tensors, flatten, load_copy, mixed_state, perturb, to_bytes
from tests.helpers.training import Net, train

STEPS = 4
SMALL_BLOCKS = {"storage": {"block_elements": 1024, "fsync": False}, "quantize": {"min_elements": 1024}}


def trained(dtype, steps=STEPS):
    """States of a model in training, with moments; from the third on with a layer more."""
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    more = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        train(model, optimizer, 4 * step, 4 * step + 4)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        yield {**state, "late.weight": more + 0.01 * step} if step > 1 else state


def mixed():
    state = mixed_state()
    for step in range(STEPS):
        yield state
        state = perturb(state, step)


RUNS = {
    "adam": (lambda: trained(torch.float32), SMALL_BLOCKS),
    "bf16": (lambda: trained(torch.bfloat16), SMALL_BLOCKS),
    "mixed": (mixed, {"delta": {"coder": "huffman"}, "storage": {"fsync": False}}),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """A chain, its last state, and what its last checkpoint decodes to: with all layers, and without refinement."""
    root = tmp_path_factory.mktemp(request.param)
    states, config = RUNS[request.param]
    for step, state in enumerate(states()):
        dsq_ckpt.save(state, root / str(step), config=config)
    last = root / str(STEPS - 1)
    return request.param, last, [load_copy(last, state, refinement=r) for r in ("auto", False)]


@pytest.fixture(params=[False, True], ids=["delta", "keyframe"])
def keyframe(request):
    return request.param


def check(path, expected):
    for refinement, value in zip(("auto", False), expected, strict=True):
        assert find_differences(load_copy(path, value, refinement=refinement), value) == []


def contents_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_values_are_the_same(run, tmp_path, keyframe):
    _, source, expected = run
    before = contents_of(source)
    done = dsq_ckpt.merge(source, tmp_path / "merged", keyframe=keyframe)
    assert contents_of(source) == before
    assert (done.links_before, done.links) == (STEPS - 1, 0 if keyframe else 1)
    moved_to = tmp_path / "elsewhere"
    shutil.move(done.path, moved_to)  # and nothing of it lies anywhere else
    check(moved_to, expected)
    assert dsq_json("verify", moved_to)["ok"]
    reader = independent.Reader(moved_to)
    lossy = {fqn: value for fqn, value in flat_tensors(expected[0]).items() if value.numel() > 4000}
    assert lossy and all(reader.tensor(fqn) == to_bytes(value) for fqn, value in lossy.items())
    old, new = Manifest.read(source), Manifest.read(moved_to)
    assert (new.refinement, new.previous, new.depth) == (old.refinement, old.previous, done.links)
    assert (new.parent is None) == keyframe and new.save_id != old.save_id
    assert (old.siblings, new.siblings) == (1, 0)  # it has another parent, or none
    ancestors = [file for file in new.files if file.role == "ancestor"]
    assert not ancestors if keyframe else len(ancestors) < STEPS - 1
    assert sum(sizes.base for sizes in new.kinds.values()) < new.sum_bytes("own")
    assert all(not report.delta for report in new.groups.values()) or not keyframe


def test_a_part_is_loaded(run, tmp_path, keyframe):
    _, source, expected = run
    path = dsq_ckpt.merge(source, tmp_path / "merged", keyframe=keyframe).path
    name, value = max(flat_tensors(expected[0]).items(), key=lambda pair: pair[1].numel())
    state = {name: torch.zeros_like(value)}
    dsq_ckpt.load(state, path)
    assert to_bytes(state[name]) == to_bytes(value)


def test_a_chain_goes_on(run, tmp_path, keyframe):
    """A save against a merged checkpoint holds the same values as one against its source, and is merged again."""
    _, source, expected = run
    state = expected[0]
    usual = RUNS[run[0]][1]
    # Whether second moments have one level per octave goes by the deltas since the keyframe, which merges change.
    moments = {"exp_avg_sq": {"codebook": {"fit": "octaves", "per_octave": 1}}}
    config = {**usual, "quantize": {**usual.get("quantize", {}), **moments}}
    path, plain = dsq_ckpt.merge(source, tmp_path / "merged", keyframe=keyframe).path, source
    for number in range(2):
        history, state = dsq_ckpt.SaveHistory(), perturb(state, number)
        for fqn, value in flat_tensors(state).items():
            if fqn.endswith("exp_avg_sq"):
                value.abs_()
        dsq_ckpt.save(state, tmp_path / f"m{number}", parent=path, config=config, history=history)
        dsq_ckpt.save(state, tmp_path / "plain" / f"{number}", parent=plain, config=config, history=history)
        path, plain = tmp_path / f"m{number}", tmp_path / "plain" / f"{number}"
    assert Manifest.read(path).depth == 2 + (not keyframe)
    after = [load_copy(plain, state, refinement=r) for r in ("auto", False)]
    check(path, after)
    again = dsq_ckpt.merge(path, tmp_path / "again", keyframe=keyframe)
    assert again.links < again.links_before
    shutil.rmtree(path)
    shutil.rmtree(tmp_path / "merged")
    check(again.path, after)
    dsq_ckpt.load(state, again.path)  # the parent of the next save, as any checkpoint that was loaded
    assert dsq_ckpt.save(state, tmp_path / "next", config=config).depth == again.links + 1


def test_a_pinned_checkpoint_stays_pinned(tmp_path, keyframe):
    state = mixed_state()
    for number in range(4):
        dsq_ckpt.save(state, tmp_path / str(number), pinned=number == 3)
        state = perturb(state, number)
    dsq_ckpt.merge(tmp_path / "3", tmp_path / "merged", keyframe=keyframe)
    dsq_ckpt.load(state, tmp_path / "merged")
    for number in range(4, 8):
        dsq_ckpt.save(state, tmp_path / str(number), config={"refinement": {"keep_last": 1}})
    assert Manifest.read(tmp_path / "merged").refinement == "kept"
    check(tmp_path / "merged", [load_copy(tmp_path / "3", state, refinement=r) for r in ("auto", False)])


def test_a_checkpoint_without_its_refinement(tmp_path, keyframe):
    state = mixed_state()
    for number in range(6):
        dsq_ckpt.save(state, tmp_path / str(number))
        state = perturb(state, number)
    assert Manifest.read(tmp_path / "2").refinement == "dropped"
    done = dsq_ckpt.merge(tmp_path / "2", tmp_path / "merged", keyframe=keyframe)
    assert Manifest.read(done.path).refinement == "dropped"
    check(done.path, [load_copy(tmp_path / "2", state)] * 2)


def test_a_merged_checkpoint_is_as_old_as_its_source(tmp_path, keyframe):
    """A run is not resumed from an older state because that was merged."""
    state = mixed_state()
    for number in range(4):
        dsq_ckpt.save(state, tmp_path / str(number))
        state = perturb(state, number)
    dsq_ckpt.merge(tmp_path / "2", tmp_path / "merged", keyframe=keyframe)
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "3")
    shutil.rmtree(tmp_path / "3")
    shutil.rmtree(tmp_path / "2")
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "merged")


def test_a_frozen_tensor_takes_no_bytes_in_a_delta(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(90, 90, generator=generator) for name in ("a.weight", "b.weight")}
    for number in range(4):
        dsq_ckpt.save(state, tmp_path / str(number))
        state["b.weight"] += 0.1 * torch.randn(90, 90, generator=generator)
    done = dsq_ckpt.merge(tmp_path / "3", tmp_path / "merged")
    with Checkpoint(done.path) as checkpoint:
        assert checkpoint.read_record(checkpoint.find_record("a.weight", (0, 0)))["blocks"] == [None]
        assert None not in checkpoint.read_record(checkpoint.find_record("b.weight", (0, 0)))["blocks"]


@pytest.mark.parametrize(("former", "name", "links"), [(v1, "2", 2), (v2, "codes-2", 2), (v3, "1", 1), (v4, "1", 1)])
def test_files_of_former_versions_are_merged(former, name, links, tmp_path):
    source = former.HERE / name
    with Checkpoint(source) as checkpoint:
        like = {fqn: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
                for fqn, tensor in checkpoint.index["tensors"].items()}
    done = dsq_ckpt.merge(source, tmp_path / "merged", keyframe=True)
    assert (done.links_before, done.links) == (links, 0)
    check(done.path, [load_copy(source, like, refinement=r) for r in ("auto", False)])
    reader = independent.Reader(done.path)
    assert all(reader.tensor(fqn) == to_bytes(value) for fqn, value in load_copy(source, like).items() if value.numel())


def test_unmergeable_chains_of_codes_are_refused(tmp_path):
    state = {"a.weight": torch.randn(70, 80)}
    for number in range(2):
        dsq_ckpt.save(state, tmp_path / "codes" / str(number))
        state["a.weight"] = state["a.weight"] + 0.01 * torch.randn(70, 80)
    with pytest.raises(dsq_ckpt.SaveFailed, match="nothing to merge: no chain"):
        dsq_ckpt.merge(tmp_path / "codes" / "1", tmp_path / "x")
    with pytest.raises(dsq_ckpt.SaveFailed, match="nothing to merge: it is a keyframe"):
        dsq_ckpt.merge(tmp_path / "codes" / "0", tmp_path / "x", keyframe=True)
    for number in range(3):
        dsq_ckpt.save(state, tmp_path / "values" / str(number), config=DIFFERENCES)
        state["a.weight"] = state["a.weight"] + 0.01 * torch.randn(70, 80)
    with pytest.raises(dsq_ckpt.SaveFailed, match="cannot do without"):
        dsq_ckpt.merge(tmp_path / "values" / "2", tmp_path / "x", keyframe=True)
    assert not (tmp_path / "x").exists()


def test_damage_is_not_carried_over(run, tmp_path, keyframe):
    """Every file of the chain is read, and its damage named."""
    _, source, _ = run
    copy = tmp_path / "run" / "source"
    shutil.copytree(source, copy)
    for file in sorted(copy.glob("*.dsq")):
        held = file.read_bytes()
        file.write_bytes(held[:16] + bytes(len(held) // 2) + held[16 + len(held) // 2 :])
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
            dsq_ckpt.merge(copy, tmp_path / "run" / "x", keyframe=keyframe)
        assert not (tmp_path / "run" / "x").exists()
        file.write_bytes(held)


def test_a_merge_that_fails_leaves_nothing(run, tmp_path, keyframe, monkeypatch):
    """Neither files nor the directory it made; and the next one to the same directory succeeds."""
    _, source, expected = run
    before = contents_of(source)
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space")))
        for name in ("made", "there"):
            with pytest.raises(dsq_ckpt.SaveFailed, match=f"'.*{name}' was not written: OSError: no space"):
                dsq_ckpt.merge(source, tmp_path / name, keyframe=keyframe)
    assert not (tmp_path / "made").exists() and list((tmp_path / "there").iterdir()) == []
    assert contents_of(source) == before
    check(dsq_ckpt.merge(source, tmp_path / "there", keyframe=keyframe).path, expected)


@pytest.mark.parametrize("change", ["itself", "circle", "group", "codebook", "blocks", "type", "shape", "symbols"])
def test_records_that_do_not_fit_are_refused(tmp_path, change, keyframe):
    state = {"a.weight": torch.randn(70, 80), "b.weight": torch.randn(70, 80)}
    for number in range(3):
        state = perturb(state, number)
        dsq_ckpt.save(state, tmp_path / str(number), config={"quantize": {"weights": {"codebook": {"fit": "kmeans"}}}})
    path = tmp_path / "2"

    def edit(contents):
        record, other = contents["records"][:2]
        if change == "itself":
            record["parent"] = [name, 0]
        elif change == "circle":
            record["parent"], other["parent"] = [name, 1], [name, 0]
        elif change == "group":
            record["group"] = ["weights"]
        elif change == "codebook":
            del contents["groups"][record["group"]]
        elif change == "blocks":
            record["blocks"] = record["blocks"] * 2
        elif change == "type":
            del record["type"]
        elif change == "shape":
            record["shape"] = [70, "80"]
        else:
            book = contents["groups"][record["group"]]["codebook"]
            book["levels"] = book["levels"][:2]
            book["cells"] = [bounds[:2] for bounds in book["cells"]]

    name = find_file(path).name
    aside = [file.rename(tmp_path / file.name) for file in path.glob("*.dsq") if file.name != name]
    edit_contents(path, edit)
    for file in aside:
        file.rename(path / file.name)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=path.name):
        dsq_ckpt.merge(path, tmp_path / "x", keyframe=keyframe)
    assert not (tmp_path / "x" / "manifest.json").exists()


def test_on_the_command_line(run, tmp_path):
    _, source, expected = run
    assert "3 deltas merged into 1" in dsq_stdout("merge", source, tmp_path / "x")
    assert "3 deltas merged into a keyframe" in dsq_stdout("merge", source, tmp_path / "y", "--keyframe")
    assert dsq_json("merge", source, tmp_path / "z", "--keyframe")["links"] == 0
    assert "holds a complete checkpoint" in dsq_error("merge", source, tmp_path / "y")
    for name in "xyz":
        check(tmp_path / name, expected)
    assert "1 from the keyframe" in (text := dsq_stdout("inspect", tmp_path / "x")) and "None" not in text
    dsq_stdout("export", tmp_path / "y", tmp_path / "y.pt")
    stored = torch.load(tmp_path / "y.pt", weights_only=False)
    fqn, value = max(flat_tensors(expected[0]).items(), key=lambda pair: pair[1].numel())
    assert to_bytes(flatten(stored)[fqn]) == to_bytes(value)
