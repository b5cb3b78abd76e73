"""Chains: which checkpoint is coded against which, what each needs to be read, and how long refinements live."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine import chain, writing
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.storage import concurrent_changes, container, links
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import (
    KEEP_ONE,
    DecodedCheckpoints,
    find_differences,
    flatten,
    is_equal,
    load_copy,
    mixed_state,
    perturb,
    relative_error,
)

BASE = {"refinement": False}


def chain_of(tmp_path, count, state=None, **options):
    """`count` checkpoints of a state that moves; returns their paths and states."""
    state = mixed_state() if state is None else state
    paths, states = [], []
    for number in range(count):
        paths.append(tmp_path / f"step-{number}")
        dsq_ckpt.save(state, paths[-1], **options)
        states.append(state)
        state = perturb(state, number)
    return paths, states


def depths(paths):
    return [Manifest.read(path).depth for path in paths]


def test_a_save_parses_the_contents_of_its_parent_once(tmp_path, monkeypatch):
    states, parsed = chain_of(tmp_path, 4)[1], []
    unpack = functools.lru_cache(16)(lambda data: parsed.append(data) or container._unpack(data))
    monkeypatch.setattr(container, "_unpack_small", unpack)
    dsq_ckpt.save(perturb(states[-1], 9), tmp_path / "next")
    assert 1 <= len(parsed) == len(set(parsed))
    contents = [json.dumps(unpack(data)) for data in parsed]
    load_copy(tmp_path / "next", states[0])
    assert contents == [json.dumps(unpack(data)) for data in parsed[: len(contents)]], "they were modified"


def test_chain_is_self_contained(tmp_path):
    paths, states = chain_of(tmp_path, 5)
    assert depths(paths) == [0, 1, 2, 3, 4]
    copies = {path: load_copy(path, states[0], **BASE) for path in paths}
    newest = load_copy(paths[-1], states[0])
    for number, path in enumerate(paths[:-1]):
        shutil.rmtree(path)
        for later in paths[number + 1 :]:
            assert find_differences(load_copy(later, states[0], **BASE), copies[later]) == []
    assert find_differences(load_copy(paths[-1], states[0]), newest) == []
    shutil.move(paths[-1], tmp_path / "elsewhere")
    assert find_differences(load_copy(tmp_path / "elsewhere", states[0]), newest) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_hard_links(tmp_path, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    paths, states = chain_of(tmp_path, 3)
    assert depths(paths) == [0, 1, 2]
    assert all(file.stat().st_nlink == 1 for path in paths for file in path.iterdir())
    checkpoints = DecodedCheckpoints(states[0], paths[-1])
    for path in paths[:-1]:
        shutil.rmtree(path)
    checkpoints.check()
    with pytest.raises(dsq_ckpt.DSQError, match="overwrite=True"):
        dsq_ckpt.save(states[0], paths[-1])


def test_other_link_errors_are_not_hidden(tmp_path, monkeypatch):
    paths, states = chain_of(tmp_path, 1)

    def refuse(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(dsq_ckpt.DSQError, match="Input/output error"):
            dsq_ckpt.save(states[0], tmp_path / "next")
    assert not (tmp_path / "next").exists()
    assert dsq_ckpt.latest(tmp_path) == str(paths[0])


def test_continues_after_load(tmp_path):
    paths, states = chain_of(tmp_path, 3)
    history = dsq_ckpt.SaveHistory()  # a new process
    state = load_copy(paths[-1], states[0], history=history)
    dsq_ckpt.save(perturb(state, 9), tmp_path / "next", history=history)
    manifest = Manifest.read(tmp_path / "next")
    assert (manifest.depth, manifest.parent_name) == (3, "step-2")
    history = dsq_ckpt.SaveHistory()
    load_copy(paths[1], states[0], history=history)  # going back: the older checkpoint is the parent now
    dsq_ckpt.save(states[1], tmp_path / "branch", history=history)
    assert Manifest.read(tmp_path / "branch").parent_name == "step-1"


def test_memory_and_disk_give_the_same_chain(tmp_path):
    """Codes that are still in memory and codes decoded from the files lead to the same checkpoint."""
    chain_of(tmp_path / "a", 4)
    state = mixed_state()
    for number in range(4):
        parent = None if number == 0 else tmp_path / "b" / f"step-{number - 1}"
        dsq_ckpt.save(state, tmp_path / "b" / f"step-{number}", parent=parent, history=dsq_ckpt.SaveHistory())
        state = perturb(state, number)
    for number in range(4):
        a, b = (load_copy(tmp_path / run / f"step-{number}", state, **BASE) for run in "ab")
        assert find_differences(a, b) == []
    assert depths([tmp_path / "b" / f"step-{n}" for n in range(4)]) == [0, 1, 2, 3]


def test_keyframe_policy(tmp_path):
    paths, _ = chain_of(tmp_path / "a", 6, config={"delta": {"max_chain": 2}})
    assert depths(paths) == [0, 1, 2, 0, 1, 2]
    paths, _ = chain_of(tmp_path / "b", 3, config={"delta": {"enabled": False}})
    assert depths(paths) == [0, 0, 0]
    paths, _ = chain_of(tmp_path / "c", 3, parent=None)
    assert depths(paths) == [0, 0, 0]
    paths, _ = chain_of(tmp_path / "d", 6, config="exact")  # all of which stay
    assert depths(paths) == [0, 1, 2, 3, 4, 5]


def test_named_parent(tmp_path):
    paths, states = chain_of(tmp_path, 3)
    other = tmp_path / "other run" / "x"
    dsq_ckpt.save(states[2], other, parent=paths[0])
    assert (Manifest.read(other).depth, Manifest.read(other).parent_name) == (1, "step-0")
    checkpoints = DecodedCheckpoints(states[0], other)
    for path in paths:
        shutil.rmtree(path)
    checkpoints.check()
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(dsq_ckpt.DSQError, match=r"does not exist|not a checkpoint|no manifest"):
            dsq_ckpt.save(states[0], tmp_path / "y", parent=missing)
    assert not (tmp_path / "y" / "manifest.json").exists()


def test_parent_gone_or_damaged(tmp_path):
    paths, states = chain_of(tmp_path, 2)
    shutil.rmtree(paths[1])
    with pytest.warns(UserWarning, match="gone or was replaced"):
        dsq_ckpt.save(states[1], tmp_path / "x")
    assert Manifest.read(tmp_path / "x").depth == 0
    for file in (tmp_path / "x").glob("*.dsq"):
        file.unlink()
    with pytest.warns(UserWarning, match="lacks"):
        dsq_ckpt.save(states[1], tmp_path / "y")
    assert Manifest.read(tmp_path / "y").depth == 0
    dsq_ckpt.save(states[0], tmp_path / "y", overwrite=True, parent=None)
    dsq_ckpt.save(states[1], tmp_path / "z")
    assert Manifest.read(tmp_path / "z").depth == 1
    assert relative_error(states[1]["lossy"]["linear.weight"], load_copy(tmp_path / "z", states[0])["lossy"][
        "linear.weight"]) < 0.02


@pytest.mark.parametrize("step", ["quantize", "write"])
def test_a_parent_that_is_removed_meanwhile(tmp_path, monkeypatch, step):
    """As by a trainer that keeps one checkpoint, and does not wait for the next; once linked, its files are there."""
    paths, states = chain_of(tmp_path, 1)
    done = getattr(SavePipeline, step)

    def removed_after(*arguments):
        result = done(*arguments)
        shutil.rmtree(paths[0], ignore_errors=True)
        return result

    monkeypatch.setattr(SavePipeline, step, removed_after)
    future = dsq_ckpt.async_save(perturb(states[0], 1), tmp_path / "next")
    if step == "write":
        assert future.result().depth == 1
    else:
        with pytest.raises(dsq_ckpt.SaveFailed, match=r"step-0' was removed while this checkpoint, .* save again"):
            future.result()
        assert not (tmp_path / "next").exists()
        monkeypatch.undo()
        with pytest.warns(UserWarning, match="gone or was replaced"):
            assert dsq_ckpt.save(perturb(states[0], 1), tmp_path / "next").keyframe
    back, truth = flatten(load_copy(tmp_path / "next", states[0])), flatten(perturb(states[0], 1))
    assert all(relative_error(value, back[name]) < 0.3 for name, value in truth.items() if name.startswith("lossy"))


@pytest.mark.parametrize(("step", "options"), [
    ("__init__", {}), ("read_codes", {}),
    ("read_values", {"delta": {"against": "values"}, "quantize": {"exp_avg_sq": {"method": "exact"}}}),
    ("link_parent_files", {}), ("link_parent_files", {"storage": {"replicate_keyframes": 2}}),
])
def test_a_parent_that_is_removed_before_it_is_read(tmp_path, monkeypatch, step, options):
    """Whatever was to be read of it: not as one that does not exist, as if it had been named."""
    paths, states = chain_of(tmp_path, 1, config=options)
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load({}, paths[0], history=history)  # what the next one is coded against is read of it
    place = writing if step == "link_parent_files" else chain.ParentCheckpoint
    do, met = getattr(place, step), []

    def after_removal(*arguments):
        met.append(step)
        shutil.rmtree(paths[0], ignore_errors=True)
        return do(*arguments)

    monkeypatch.setattr(place, step, after_removal)
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"step-0' was removed while this checkpoint, .* save again"):
        dsq_ckpt.save(perturb(states[0], 1), tmp_path / "next", config=options, history=history)
    assert met and not (tmp_path / "next").exists()


def test_a_parent_whose_removal_is_half_done(tmp_path, monkeypatch):
    """Its manifest is there when a file of it is not."""
    paths, states = chain_of(tmp_path, 1)
    monkeypatch.setattr(links, "REMOVAL_TIMEOUT", 600)
    inherit, lost_files, looked = writing.link_parent_files, concurrent_changes.find_missing_files, []

    def half(*arguments):
        for file in paths[0].glob("*.dsq"):
            file.unlink()
        return inherit(*arguments)

    def rest(*arguments, **options):
        looked.append(lost_files(*arguments, **options))
        shutil.rmtree(paths[0], ignore_errors=True)
        return looked[-1]

    monkeypatch.setattr(writing, "link_parent_files", half)
    monkeypatch.setattr(concurrent_changes, "find_missing_files", rest)
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"step-0' was removed while this checkpoint, .* save again"):
        dsq_ckpt.save(perturb(states[0], 1), tmp_path / "next")
    assert looked[0]


def test_a_checkpoint_that_is_removed_before_its_siblings_are_counted(tmp_path, monkeypatch):
    """A checkpoint that is gone is no parent, and nothing has failed."""
    options = {"delta": {"max_chain": "auto"}}
    paths, states = chain_of(tmp_path, 3, config=options)
    shared = chain._find_shared_parent

    def after_removal(*arguments):
        shutil.rmtree(paths[-1])
        return shared(*arguments)

    monkeypatch.setattr(chain, "_find_shared_parent", after_removal)
    with pytest.warns(UserWarning, match="cannot be read; writing a keyframe"):
        assert dsq_ckpt.save(states[-1], tmp_path / "next", config=options).keyframe


def test_refinement_is_dropped_from_older_checkpoints(tmp_path):
    paths, states = chain_of(tmp_path, 1)
    full = load_copy(paths[0], states[0])
    base = load_copy(paths[0], states[0], **BASE)
    assert find_differences(full, base) != []
    dsq_ckpt.save(states[0], tmp_path / "next", config=KEEP_ONE)
    assert [Manifest.read(p).refinement for p in (paths[0], tmp_path / "next")] == ["dropped", "kept"]
    assert not list(paths[0].glob("*.refinement"))
    assert find_differences(load_copy(paths[0], states[0]), base) == []
    assert find_differences(load_copy(paths[0], states[0], **BASE), base) == []
    with pytest.raises(dsq_ckpt.DSQError, match="dropped its refinement"):
        load_copy(paths[0], states[0], refinement=True)
    load_copy(tmp_path / "next", states[0], refinement=True)


def test_keep_last_and_pinned(tmp_path):
    state = mixed_state()
    for number in range(6):
        dsq_ckpt.save(
            state, tmp_path / str(number), config={"refinement": {"keep_last": 2}}, pinned=number in (1, 3)
        )
        state = perturb(state, number)
    numbers = [number for number in range(6) if Manifest.read(tmp_path / str(number)).refinement == "kept"]
    assert numbers == [1, 3, 4, 5]
    load_copy(tmp_path / "1", state, refinement=True)


def test_the_newest_three_keep_their_refinement_by_default(tmp_path):
    paths, states = chain_of(tmp_path, 5)
    assert [Manifest.read(path).refinement for path in paths] == ["dropped", "dropped", "kept", "kept", "kept"]
    load_copy(paths[2], states[2], refinement=True)  # two checkpoints back, after a loss spike


def test_retention_looks_at_its_own_run_only(tmp_path):
    _, states = chain_of(tmp_path / "a", 1)
    dsq_ckpt.save(states[0], tmp_path / "b" / "x")
    (tmp_path / "b" / "deep" / "deeper").mkdir(parents=True)
    dsq_ckpt.save(states[0], tmp_path / "b" / "deep" / "deeper" / "y")
    dsq_ckpt.save(states[0], tmp_path / "b" / "z", config=KEEP_ONE)
    refinements = {path.parent.name for path in tmp_path.rglob("*.refinement")}
    assert refinements == {"step-0", "y", "z"}


def test_every_configuration_follows_every_other(tmp_path):
    configs = [
        {"fit": "lattice"}, {"fit": "lattice", "bins": 8}, {"fit": "lattice", "step": 0.1},
        {"fit": "kmeans", "bins": 62}, {"fit": "kmeans", "bins": 5, "protect": 0.1, "prune": 0.3},
        {"fit": "lloyd", "bins": 7, "sigma": 0.2}, {"fit": "kmeans", "bins": 16, "domain": "log"},
        {"fit": "kmeans", "bins": 254},
    ]
    names, number, paths = ("linear.weight", "embed.weight", "brain.weight", "strided.weight"), 0, []
    state = {"lossy": {name: mixed_state()["lossy"][name] for name in names}}
    for first, one in enumerate(configs):  # in a run each, as a load decodes all links of a chain
        history = dsq_ckpt.SaveHistory()
        for book in (one, one, *(book for other in configs[first + 1 :] for book in (other, one))):
            config = {
                "quantize": {"weights": {"codebook": book}}, "storage": {"fsync": False},
                "delta": {"coder": "huffman" if number % 3 == 0 else "rans", "max_chain": 1000},
            }
            paths.append(tmp_path / str(first) / str(number))
            dsq_ckpt.save(state, paths[-1], config=config, history=history)
            history = dsq_ckpt.SaveHistory()  # the next save knows what is read of the files alone
            back = flatten(load_copy(paths[-1], state, history=history))
            for fqn, value in flatten(state).items():
                if fqn.startswith("lossy"):
                    limit = 0.2 if book.get("domain") == "log" else 0.06
                    assert relative_error(value, back[fqn]) < limit, (one, book, fqn)
            state, number = perturb(state, number, 0.0005), number + 1
    assert max(depths(paths)) > 10


def test_exact_and_lossy_alternate(tmp_path):
    state = mixed_state()
    exact, bf16 = dsq_ckpt.DSQConfig.preset("exact"), {"quantize": {"weights": {"method": "bf16"}}}
    configs = [None, exact, None, bf16, None, None]
    for number, config in enumerate(configs):
        dsq_ckpt.save(state, tmp_path / str(number), config=config)
        back = load_copy(tmp_path / str(number), state)
        assert relative_error(state["lossy"]["linear.weight"], back["lossy"]["linear.weight"]) < 0.015
    assert depths(tmp_path / str(n) for n in range(6)) == [0, 0, 0, 0, 0, 1]


def test_tensors_come_change_and_go(tmp_path):
    g = torch.Generator().manual_seed(3)
    a, b, c = (torch.randn(90, 90, generator=g) for _ in range(3))
    states = [
        {"a.weight": a, "b.weight": b}, {"a.weight": a, "b.weight": torch.cat([b, c])}, {"b.weight": b, "c.weight": c},
        {"a.weight": a, "c.weight": c.bfloat16()}, {"embed.weight": a, "c.weight": c}, {"only": 1},
        {"a.weight": a, "b.weight": b},
    ]
    for number, state in enumerate(states):
        dsq_ckpt.save(state, tmp_path / str(number))
        back = load_copy(tmp_path / str(number), state)
        for fqn, value in state.items():
            if isinstance(value, torch.Tensor):
                assert relative_error(value, back[fqn]) < 0.015, (number, fqn)
    assert depths(tmp_path / str(n) for n in range(4)) == [0, 1, 0, 1]  # what changed its shape starts anew


@pytest.mark.parametrize("delta", [False, True])
def test_outlier_tensor_does_not_spoil_its_group(tmp_path, delta):
    g = torch.Generator().manual_seed(5)
    state = {f"layer{n}.weight": torch.randn(80, 80, generator=g) * 0.02 for n in range(6)}
    alone = dict(state)
    state["wild.weight"] = torch.randn(80, 80, generator=g) * 2000
    state["tiny.weight"] = torch.randn(80, 80, generator=g) * 1e-9
    for number in range(1 + delta):
        dsq_ckpt.save(state, tmp_path / "with" / str(number))
        dsq_ckpt.save(alone, tmp_path / "without" / str(number))
    back = load_copy(tmp_path / "with" / str(number), state)
    plain = load_copy(tmp_path / "without" / str(number), alone)
    for fqn, value in state.items():
        limit = 1.1 * relative_error(value, plain[fqn]) if fqn in alone else 0.015
        assert relative_error(value, back[fqn]) < limit, fqn


def test_outlier_elements_do_not_spoil_their_tensor(tmp_path):
    w = torch.randn(100, 100) * 0.02
    w[::10, 7] = torch.linspace(-5000, 5000, 10)
    for name in "ab":
        dsq_ckpt.save({"w": w}, tmp_path / name)
        back = load_copy(tmp_path / name, {"w": w})["w"]
        body = w.abs() < 1
        assert relative_error(w[body], back[body]) < 0.02
        assert is_equal(w[~body], back[~body])


def test_frozen_tensors_cost_nothing_in_a_delta(tmp_path):
    g = torch.Generator().manual_seed(7)
    state = {f"layer{n}.weight": torch.randn(400, 250, generator=g) * 0.02 for n in range(4)}
    config = {"quantize": {"weights": {"refinement_bits": 0}}}
    for name in "ab":
        dsq_ckpt.save(state, tmp_path / name, config=config)
    key, delta = (dsq_ckpt.describe(tmp_path / name)["by_kind"]["weights"] for name in "ab")
    assert delta["bytes_base"] < 0.01 * key["bytes_base"], (key, delta)
    assert find_differences(load_copy(tmp_path / "a", state), load_copy(tmp_path / "b", state)) == []
