"""Super-steps: chains of differences merged into few records that hold the same values, bit for bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.dequantizer import add_residual
from dsq_ckpt.quantization.superstep import MOST_CODES, SuperStep
from dsq_ckpt.storage import files
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import FORMAT_VERSION
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.target_directory import TargetDirectory
from tests.helpers import independent_reader as independent
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.lc import CONFIG, algorithm_1, make_config, make_walk
from tests.helpers.states import find_differences, load_copy, to_bytes

STEPS = 7
FITS = {
    "exponent": CONFIG, "partition": make_config(fit="partition", parts=3), "largest": make_config(fit="largest"),
    "lattice": make_config(4, fit="lattice"), "kmeans": make_config(fit="kmeans", bins=5, protect=0.01),
}


def states(steps=STEPS, seed=0):
    first = make_walk(60, 80, steps=steps, seed=seed)
    second = make_walk(90, 64, steps=steps, seed=seed + 1, dtype=torch.bfloat16)
    return [{"a.weight": a, "half": {"b.weight": b}, "bias": a[0].clone(), "step": n}
            for n, (a, b) in enumerate(zip(first, second, strict=True))]


@pytest.fixture(scope="module", params=FITS)
def run(request, tmp_path_factory):
    """A chain, and what its last checkpoint decodes to: with all layers, and without refinement."""
    root = tmp_path_factory.mktemp(request.param)
    for state in states():
        dsq_ckpt.save(state, root / str(state["step"]), config=FITS[request.param])
    last = root / str(STEPS - 1)
    return request.param, last, [load_copy(last, state, refinement=r) for r in ("auto", False)]


def check(path, expected):
    for refinement, value in zip(("auto", False), expected, strict=True):
        assert find_differences(load_copy(path, value, refinement=refinement), value) == []


def contents_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def types(path):
    with Checkpoint(path) as checkpoint:
        return [record["type"] for record in checkpoint.open_reader(find_file(path).name).contents["records"]]


def test_values_are_the_same(run, tmp_path):
    name, source, expected = run
    before = contents_of(source)
    done = dsq_ckpt.merge(source, tmp_path / "merged")
    assert contents_of(source) == before
    assert done.links_before == STEPS - 1 > done.links == Manifest.read(done.path).depth
    assert "merged" in types(done.path) and (done.links == 1) == (name in ("exponent", "largest"))
    moved = tmp_path / "elsewhere"
    shutil.move(done.path, moved)  # and nothing of it lies anywhere else
    check(moved, expected)
    assert dsq_json("verify", moved)["ok"]
    reader = independent.Reader(moved)
    assert all(reader.tensor(fqn) == to_bytes(value) for fqn, value in
               (("a.weight", expected[0]["a.weight"]), ("half.b.weight", expected[0]["half"]["b.weight"])))
    old, new = Manifest.read(source), Manifest.read(moved)
    assert (new.refinement, new.previous, new.version) == (old.refinement, old.previous, FORMAT_VERSION)
    assert new.parent == Manifest.read(source.parent / "0").save_id and new.save_id != old.save_id
    assert sum(file.role == "ancestor" for file in new.files) == 1
    assert sum(sizes.base for sizes in new.kinds.values()) < new.sum_bytes("own")


def test_a_chain_goes_on(run, tmp_path):
    """Merged, continued, merged again."""
    name, source, _ = run
    more = states(STEPS + 4)
    path = dsq_ckpt.merge(source, tmp_path / "merged").path
    plain = source
    for number in range(STEPS, STEPS + 4):
        options = {"config": FITS[name], "history": dsq_ckpt.SaveHistory()}
        dsq_ckpt.save(more[number], tmp_path / f"m{number}", parent=path, **options)
        dsq_ckpt.save(more[number], tmp_path / "plain" / f"{number}", parent=plain, **options)
        path, plain = tmp_path / f"m{number}", tmp_path / "plain" / f"{number}"
    expected = [load_copy(path, more[-1], refinement=r) for r in ("auto", False)]
    if name != "partition":  # whose turn it is depends on the length of the chain
        check(plain, expected)
    again = dsq_ckpt.merge(path, tmp_path / "again")
    assert again.links <= again.links_before
    check(again.path, expected)


def test_merged_values_equal_algorithm_1(tmp_path):
    """Long enough for several super-steps."""
    chain = make_walk(50, 100, steps=24)
    for number, state in enumerate(chain):
        dsq_ckpt.save({"a.weight": state}, tmp_path / str(number), config=CONFIG)
    done = dsq_ckpt.merge(tmp_path / "23", tmp_path / "merged")
    assert done.links_before == 23 and 1 < done.links < 8
    sizes = [sum(file.size for file in Manifest.read(path).files) for path in (tmp_path / "23", done.path)]
    assert sizes[1] < sizes[0]
    assert torch.equal(load_copy(done.path, {"a.weight": chain[0]})["a.weight"], algorithm_1(chain)[-1])


def test_unmergeable_chains_are_refused(run, tmp_path):
    _, source, _ = run
    for number in (0, 1):
        with pytest.raises(dsq_ckpt.SaveFailed, match="nothing to merge"):
            dsq_ckpt.merge(source.parent / str(number), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(dsq_ckpt.CheckpointExists, match="a merge replaces none; name a new directory"):
        dsq_ckpt.merge(source, source.parent / "1")
    with pytest.raises(dsq_ckpt.CheckpointNotFound):
        dsq_ckpt.merge(tmp_path / "nowhere", tmp_path / "x")


def test_a_merge_that_is_killed_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    _, source, expected = run
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(TargetDirectory, "discard", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            dsq_ckpt.merge(source, tmp_path / "run" / "x")
    with pytest.raises(dsq_ckpt.CheckpointNotFound):
        load_copy(tmp_path / "run" / "x", expected[0])
    assert dsq_json("gc", tmp_path / "run", "--older-than", "0")["bytes"] > 0
    assert not (tmp_path / "run" / "x").exists()
    dsq_ckpt.merge(source, tmp_path / "run" / "x")
    check(tmp_path / "run" / "x", expected)


def test_damage_is_not_carried_over(run, tmp_path):
    _, source, _ = run
    copy = tmp_path / "run" / "source"
    shutil.copytree(source, copy)
    for file in copy.glob("*.dsq"):
        if file.name != find_file(source.parent / "0").name:  # the keyframe is linked, not read
            held = file.read_bytes()
            file.write_bytes(held[:16] + bytes(len(held[16:400])) + held[400:])
            with pytest.raises(dsq_ckpt.CorruptCheckpoint):
                dsq_ckpt.merge(copy, tmp_path / "run" / "x")
            assert not (tmp_path / "run" / "x" / "manifest.json").exists()
            file.write_bytes(held)


@pytest.mark.parametrize(
    "change", ["steps", "ragged", "none", "infinite", "text", "count", "residual", "model", "wide"]
)
def test_records_that_do_not_fit_are_refused(tmp_path, change):
    for state in states(4):
        dsq_ckpt.save({"a.weight": state["a.weight"]}, tmp_path / str(state["step"]), config=make_config(
            fit="kmeans", bins=5, protect=0.01))
    target = dsq_ckpt.merge(tmp_path / "3", tmp_path / "merged").path

    def edit(contents):
        record = contents["records"][0]
        assert record["type"] == "merged" and record["protected_count"] > 0
        if change == "steps":
            record["steps"] = [step[:-1] for step in record["steps"]]
        elif change == "ragged":
            record["steps"][0].pop()
        elif change == "none":
            record["steps"] = []
        elif change == "infinite":
            record["steps"][1][0] = 1e39
        elif change == "wide":
            record["steps"][1][0] = 0.1
        elif change == "text":
            record["steps"][1][0] = "x"
        elif change == "count":
            record["protected_count"] -= 1
        elif change == "residual":
            del record["residual"]
        else:
            record["model"] = record["protected"]

    ancestor = find_file(target, "ancestor")
    ancestor.rename(tmp_path / "aside")
    edit_contents(target, edit)
    (tmp_path / "aside").rename(ancestor)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint):
        load_copy(target, {"a.weight": torch.zeros(60, 80)})
    with pytest.raises((independent.Refused, TypeError, ValueError)):
        independent.Reader(target).tensor("a.weight")


def test_damage_is_found(run, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "REMOVAL_TIMEOUT", 0.01)  # nobody is removing it
    _, source, expected = run
    path = tmp_path / "copy"
    shutil.copytree(dsq_ckpt.merge(source, tmp_path / "run" / "x").path, path)
    flip_bit(find_file(path, "ancestor"))
    assert not dsq_json("verify", path, code=1)["ok"]
    find_file(path).unlink()
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match="dsq"):
        load_copy(path, expected[0])


def test_on_the_command_line(run, tmp_path):
    name, source, expected = run
    if name != "exponent":
        return
    assert "6 deltas merged into 1" in dsq_stdout("merge", source, tmp_path / "x")
    check(tmp_path / "x", expected)
    assert dsq_json("merge", source, tmp_path / "y")["links"] == 1
    assert "holds a complete checkpoint" in dsq_error("merge", source, tmp_path / "y")
    listed = dsq_json("inspect", tmp_path / "x", "--tensors")["tensors"]
    assert next(tensor["stored"] for tensor in listed if tensor["name"] == "a.weight") == "merged"
    dsq_stdout("export", tmp_path / "x", tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["a.weight"], expected[0]["a.weight"])


@st.composite
def supersteps(draw, n=600):
    k, m = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, k + 1, n).astype(np.uint8)
    if draw(st.booleans()) and k:
        codes[codes == k] = 0
    scale = draw(st.sampled_from([1.0, 1e-30, 1e38]))
    table, own = (
        np.float32(np.clip(rng.standard_normal((m, w)) * scale, -3.4e38, 3.4e38)) for w in (k, int((codes == k).sum()))
    )
    return SuperStep.from_stored(codes, table, own, "test")


@settings(deadline=None, max_examples=60)
@given(supersteps(), supersteps(), st.integers(0, 99))
def test_one_after_the_other(first, second, seed):
    start = np.random.default_rng(seed).standard_normal(600).astype(np.float32)
    expected = start.copy()
    for step in (first, second):
        for values in step.steps_at(np.arange(600)):
            add_residual(expected, values, expected)
    total = start.copy()
    with Workers(2, 128) as workers:
        first.add_to(total, workers)
        second.add_to(total, workers)
        assert total.tobytes() == expected.tobytes()
        both = first.join(second)
        single = int(((first.codes == first.escape_code) | (second.codes == second.escape_code)).sum())
        if both is None:
            pairs = len(np.unique(np.stack([first.codes, second.codes]), axis=1).T)
            assert pairs > MOST_CODES or single * (len(first.steps) + len(second.steps)) > 1200
        else:
            total = start.copy()
            both.add_to(total, workers)
            assert total.tobytes() == expected.tobytes() and both.steps.shape[1] <= MOST_CODES
            assert both.escaped.shape[1] == single
