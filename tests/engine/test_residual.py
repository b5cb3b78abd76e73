"""Chains of differences to the last reconstructed values: the same as LC-Checkpoint's, and as robust as others."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.storage import files, links
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import independent_reader as independent
from tests.helpers import processes
from tests.helpers.commands import dsq_json, dsq_stdout, find_file, flip_bit
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.lc import CONFIG, algorithm_1, make_config, make_walk
from tests.helpers.states import (
    KEEP_ONE,
    find_differences,
    is_equal,
    load_copy,
    mixed_state,
    perturb,
    relative_error,
    to_bytes,
)

BASE = {"refinement": False}


def state_of(*tensors, **more):
    return {**{f"layer{n}.weight": tensor for n, tensor in enumerate(tensors)}, **more}


def chain_of(root, states, config=CONFIG, save=dsq_ckpt.save):
    paths = [root / f"step-{number}" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save(state, path, config=config)
    return paths


def records(path, key="residual"):
    """By name, those of the checkpoint's own records that have a key."""
    with Checkpoint(path) as checkpoint:
        entries = {chunk.fqn: checkpoint.read_record(ref) for chunk, ref in checkpoint.iter_chunks()}
    return {fqn: record for fqn, record in entries.items() if key in record}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A keyframe and four differences of two tensors, and what Algorithm 1 makes of them."""
    root = tmp_path_factory.mktemp("run")
    first, second = make_walk(70, 80, steps=5), make_walk(96, 64, steps=5, seed=1, dtype=torch.bfloat16)
    states = [state_of(a, b, step=n, bias=a[0].clone()) for n, (a, b) in enumerate(zip(first, second, strict=True))]
    paths = chain_of(root, states)
    truth = [state_of(a, b.bfloat16()) for a, b in zip(algorithm_1(first), algorithm_1(second), strict=True)]
    return paths, states, truth


@pytest.fixture
def copied(run, tmp_path):
    """The newest of them, to be changed."""
    shutil.copytree(run[0][-1], tmp_path / "run" / "x")
    return tmp_path / "run" / "x", run[1][-1], run[2][-1]


def check(path, like, truth):
    back = load_copy(path, like)
    for fqn, value in truth.items():
        assert is_equal(back[fqn], value), (path.name, fqn)


def test_values_equal_algorithm_1(run):
    paths, states, truth = run
    assert [Manifest.read(path).depth for path in paths] == [0, 1, 2, 3, 4]
    for path, state, expected in zip(paths, states, truth, strict=True):
        check(path, state, expected)
        reader = independent.Reader(path)
        assert all(reader.tensor(fqn) == to_bytes(value) for fqn, value in expected.items())
    assert find_differences(load_copy(paths[0], states[0]), states[0]) == []  # the keyframe is exact, and says so
    assert not Manifest.read(paths[0]).lossy and Manifest.read(paths[1]).lossy
    assert set(records(paths[4])) == set(truth[0]) and not records(paths[0])
    assert all(group.delta for group in Manifest.read(paths[1]).groups.values())


@pytest.mark.parametrize("levels, coder", [(1, "huffman"), (3, "rans"), (6, "huffman")])
def test_other_numbers_of_buckets(tmp_path, levels, coder):
    states = make_walk(60, 90, steps=4, seed=levels)
    config = make_config(fit="exponent", bits=levels)
    config = {**config, "delta": {**config["delta"], "coder": coder}}
    paths = chain_of(tmp_path, [state_of(state) for state in states], config)
    for path, state, expected in zip(paths, states, algorithm_1(states, levels), strict=True):
        check(path, state_of(state), state_of(expected))


def test_the_error_stays_bounded(tmp_path):
    """What a difference leaves out is in the next one."""
    states = make_walk(64, 80, steps=25, scale=0.002)
    paths = chain_of(tmp_path, [state_of(state) for state in states])
    errors = [relative_error(state, load_copy(path, state_of(state))["layer0.weight"])
              for path, state in zip(paths, states, strict=True)]
    moved_by = relative_error(states[1], states[0])
    assert max(errors) < 2 * moved_by and max(errors[15:]) < 1.2 * max(errors[5:15]), errors


def test_a_parent_that_is_far_off(tmp_path):
    """One value of it is in a spike of the loss: the error of a difference to that would be larger than all values."""
    first, second = make_walk(70, 80, steps=2)
    first[3, 4] = 1e20
    _, path = chain_of(tmp_path, [state_of(first, bias=first[:, 0]), state_of(second, bias=second[:, 0])])
    assert is_equal(load_copy(path, state_of(second))["layer0.weight"], second) and not records(path)


def test_directories_are_self_contained(run, tmp_path):
    paths, states, truth = run
    for number in (3, 4):
        shutil.copytree(paths[number], tmp_path / str(number))
    check(tmp_path / "4", states[4], truth[4])
    whole = [tmp_path / "linked" / path.name for path in paths]
    chain_of(tmp_path / "linked", states)
    assert (find_file(whole[0])).stat().st_nlink == 5
    for number in range(4):
        shutil.rmtree(whole[number])
        for later in range(number + 1, 5):
            check(whole[later], states[later], truth[later])


def test_in_another_process(run, tmp_path):
    paths, _, truth = run
    script = (
        "import sys, torch, dsq_ckpt; s = {'layer0.weight': torch.zeros(70, 80)};"
        "dsq_ckpt.load(s, sys.argv[1]); torch.save(s, sys.argv[2])"
    )
    status, output = processes.run(["-c", script, str(paths[-1]), str(tmp_path / "found")], forked=True)
    assert status == 0, output
    assert is_equal(torch.load(tmp_path / "found")["layer0.weight"], truth[-1]["layer0.weight"])


def test_memory_and_disk_give_the_same_chain(run, tmp_path):
    """Values still in memory, and values decoded after a load, or in a process that knows only the parent's path."""
    _, states, truth = run
    for number, state in enumerate(states):
        parent = None if number == 0 else tmp_path / f"{number - 1}"
        history = dsq_ckpt.SaveHistory()
        if number == 3:
            load_copy(parent, state, history=history)
            parent = "auto"
        dsq_ckpt.save(state, tmp_path / f"{number}", parent=parent, config=CONFIG, history=history)
        check(tmp_path / f"{number}", state, truth[number])
    assert Manifest.read(tmp_path / "4").depth == 4


def test_nothing_is_decoded_while_the_values_are_in_memory(tmp_path, monkeypatch):
    states = [state_of(state) for state in make_walk(70, 80, steps=4)]
    chain_of(tmp_path / "known", states[:1])
    (memory,) = [checkpoint.cache for checkpoint in default_history().checkpoints()]
    assert {key.fqn for key in memory.values} == {"layer0.weight"} and not memory.codes
    states[0]["layer0.weight"].fill_(7)  # training goes on; what was remembered is a copy
    states[0]["layer0.weight"].copy_(make_walk(70, 80, steps=1)[0])
    monkeypatch.setattr(Checkpoint, "decode_values", None)
    chain_of(tmp_path / "run", states)


@pytest.mark.parametrize("stage", ["copy", "quantize"])
@pytest.mark.parametrize("mode", ["all", "mixed"])
def test_async(run, tmp_path, mode, stage):
    _, states, truth = run
    config = {**CONFIG, "storage": {"stage": stage}}
    for number, state in enumerate(states):
        copy = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        if mode == "mixed" and number % 2:
            dsq_ckpt.save(copy, tmp_path / f"{number}", config=CONFIG)
        else:
            future = dsq_ckpt.async_save(copy, tmp_path / f"{number}", config=config)
            for value in copy.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(1e9)  # training goes on
            future.result()
    for number, state in enumerate(states):
        check(tmp_path / f"{number}", state, truth[number])
    assert Manifest.read(tmp_path / "4").depth == 4


def test_refinement_is_that_of_the_newest(tmp_path):
    states = [mixed_state()]
    for number in range(3):
        states.append(perturb(states[-1], number))
    config = {**make_config(4, fit="lattice"), **KEEP_ONE}
    values, paths = [], []
    for number, state in enumerate(states):
        paths.append(tmp_path / str(number))
        dsq_ckpt.save(state, paths[-1], config=config)
        base, full = load_copy(paths[-1], state, **BASE), load_copy(paths[-1], state)
        for fqn, value in state["lossy"].items():
            coarse, fine = relative_error(value, base["lossy"][fqn]), relative_error(value, full["lossy"][fqn])
            assert fine <= 0.005 and (number == 0 or value.dtype.itemsize == 2 or fine < coarse / 8), (number, fqn)
        values.append(base)
    assert [Manifest.read(path).refinement for path in paths] == ["none", "dropped", "dropped", "kept"]
    assert all(find_differences(load_copy(paths[n], states[0]), values[n]) == [] for n in range(3))
    assert find_differences(load_copy(paths[3], states[0]), values[3]) != []


def test_top_n(tmp_path):
    """The largest differences arrive, in bf16; all others stay what they were."""
    before, after = make_walk(100, 100, steps=2, scale=0.01)
    paths = chain_of(tmp_path, [state_of(before), state_of(after)], make_config(fit="largest", fraction=0.05))
    change = load_copy(paths[1], state_of(after))["layer0.weight"] - before
    changed, size = change != 0, (after - before).abs()
    assert 0.045 < float(changed.float().mean()) <= 0.05
    assert size[changed].min() > size[~changed].max() * 64 / 65  # up to a bin of the sketch
    assert relative_error((after - before)[changed], change[changed]) < 2**-8
    assert records(paths[1])["layer0.weight"]["protected_count"] == int(changed.sum())


@pytest.mark.parametrize("parts", [1, 4, 7])
def test_partitions_take_turns(tmp_path, parts):
    walks = make_walk(61, 70, steps=2), make_walk(90, 90, steps=2, seed=2)
    states = [state_of(*pair) for pair in zip(*walks, strict=True)]
    later = [states[1]] * (parts + 1)
    config = make_config(fit="partition", parts=parts)
    paths = chain_of(tmp_path, [states[0], *later], config)
    for fqn, value in states[1].items():
        before, arrived = states[0][fqn].view(-1), np.zeros(value.numel(), bool)
        for turn, path in enumerate(paths[1:-1]):
            back = load_copy(path, states[1])[fqn].view(-1)
            arrived[value.numel() * turn // parts : value.numel() * (turn + 1) // parts] = True
            assert torch.equal(back[~arrived], before[~arrived])
            assert relative_error((value.view(-1) - before)[arrived], (back - before)[arrived]) < 2**-8
            count = records(path)[fqn]["protected_count"]
            assert value.numel() // parts <= count <= -(-value.numel() // parts)
        assert arrived.all() and relative_error(value.view(-1) - before, back - before) < 2**-8
        final = load_copy(paths[-1], states[1])[fqn].view(-1)  # the first part again, of what bf16 had left
        stop = value.numel() // parts
        left, right = (value.view(-1) - final).abs(), (value.view(-1) - back).abs()
        assert left[:stop].max() <= right[:stop].max() / 100 and torch.equal(left[stop:], right[stop:])


def test_without_a_parent_a_chunk_is_exact(tmp_path):
    a, b = make_walk(70, 80, steps=3), make_walk(80, 70, steps=3, seed=1)
    states = [state_of(a[0]), state_of(a[1], b[1]), state_of(a[2].view(80, 70), b[2])]  # one comes, one changes shape
    paths = chain_of(tmp_path, states)
    assert set(records(paths[1])) == {"layer0.weight"} and set(records(paths[2])) == {"layer1.weight"}
    assert is_equal(load_copy(paths[1], states[1])["layer1.weight"], b[1])
    assert is_equal(load_copy(paths[2], states[2])["layer0.weight"], states[2]["layer0.weight"])
    assert [Manifest.read(path).depth for path in paths] == [0, 1, 2]


def test_keyframes_come_when_they_are_due(tmp_path):
    states = [state_of(state) for state in make_walk(70, 80, steps=6)]
    config = {**CONFIG, "delta": {"against": "values", "max_chain": 2}}
    paths = chain_of(tmp_path, states, config)
    assert [Manifest.read(path).depth for path in paths] == [0, 1, 2, 0, 1, 2]
    for number in (0, 3):
        assert find_differences(load_copy(paths[number], states[0]), states[number]) == []


def test_from_codes_to_values_and_back(tmp_path):
    states = [state_of(state) for state in make_walk(70, 80, steps=7)]
    values, codes = make_config(4, fit="lattice"), {"quantize": {"weights": {"codebook": {"fit": "lattice"}}}}
    for number, config in enumerate([codes, codes, values, values, codes, codes, values]):
        dsq_ckpt.save(states[number], tmp_path / str(number), config=config)
        back = load_copy(tmp_path / str(number), states[0])["layer0.weight"]
        assert relative_error(states[number]["layer0.weight"], back) < 0.015, number
        reader = independent.Reader(tmp_path / str(number))
        assert reader.tensor("layer0.weight") == to_bytes(back)
    assert [bool(records(tmp_path / str(n))) for n in range(7)] == [False, False, True, True, False, False, True]
    assert [Manifest.read(tmp_path / str(n)).depth for n in range(7)] == [0, 1, 2, 3, 0, 1, 2]


def test_nonfinite_values_are_stored_exactly(tmp_path):
    """NaN, infinities and differences past the largest number are stored exactly; then the chain goes on."""
    states = [state_of(state) for state in make_walk(70, 80, steps=6)]
    states[2]["layer0.weight"][3, 3] = torch.nan
    states[4]["layer0.weight"][3, 3] = -torch.inf
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = chain_of(tmp_path, states)
    assert [Manifest.read(path).nonfinite for path in paths] == [[], [], ["layer0.weight"], [], ["layer0.weight"], []]
    assert sum("NaN or Inf" in str(warning.message) for warning in caught) == 2
    assert [bool(records(path)) for path in paths] == [False, True, False, False, False, False]
    assert all(is_equal(load_copy(path, states[0])["layer0.weight"], state["layer0.weight"])
               for path, state in zip(paths[2:], states[2:], strict=True))
    shape = torch.linspace(0.99, 1, 70 * 80).view(70, 80) * torch.tensor([[1], [-1]]).repeat(35, 1)
    huge = [state_of(shape * value) for value in (-3e38, 3e38, 3.1e38)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed")
        paths = chain_of(tmp_path / "huge", huge)
    assert [bool(records(path)) for path in paths] == [False, False, True]
    assert relative_error(huge[2]["layer0.weight"], load_copy(paths[2], huge[2])["layer0.weight"]) < 0.01
    config = {**CONFIG, "quantize": {**CONFIG["quantize"], "nonfinite": "error"}}
    for number, path in enumerate([tmp_path / "strict" / "0", tmp_path / "strict" / "1"]):
        with pytest.raises(dsq_ckpt.NonFiniteTensor, match="layer0"):
            dsq_ckpt.save(states[2 + 2 * number], path, config=config)


def test_damage_is_found(copied, monkeypatch):
    for module in (files, links):
        monkeypatch.setattr(module, "REMOVAL_TIMEOUT", 0.01)  # nobody is removing it
    path, like, truth = copied
    for file in sorted(path.glob("*.dsq")):
        held = file.read_bytes()
        contents = independent.Container(file).contents
        record = link(contents)
        offset = (record["blocks"][0] if "blocks" in record else contents["packs"][record["packs"][0]][0])[0]
        for damaged in (None, held[: len(held) // 2], held[:offset] + b"XX" + held[offset + 2 :]):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
                load_copy(path, like)
            with pytest.raises(dsq_ckpt.DSQError), warnings.catch_warnings():
                warnings.simplefilter("error")  # a warning: a keyframe is written instead
                dsq_ckpt.save(
                    like, path.parent / "y", parent=path, config=CONFIG, history=dsq_ckpt.SaveHistory()
                )
            assert not (path.parent / "y" / "manifest.json").exists()
        file.write_bytes(held)
    check(path, like, truth)


def link(contents, fqn="layer0.weight"):
    return next(record for record in contents["records"] if record["fqn"] == fqn)


@pytest.mark.parametrize("to", ["itself", "each other", "bytes", "shape", "integers", "nowhere", "no file"])
def test_chains_that_do_not_fit_are_refused(tmp_path, to):
    tensors = {"layer0.weight": torch.randn(70, 80), "other": torch.randn(9), "whole": torch.ones(70, 80).long()}
    paths = chain_of(tmp_path / "run", [{**tensors, "n": 1}, {**tensors, "n": 2}])

    def change(contents):
        own = find_file(paths[1]).name
        place = {record["fqn"]: number for number, record in enumerate(contents["records"])}
        link(contents)["residual"] = {
            "itself": [own, place["layer0.weight"]], "each other": [own, len(place)], "bytes": [own, place["n"]],
            "shape": [own, place["other"]], "integers": [own, place["whole"]], "nowhere": [own, 99],
            "no file": ["x.dsq", 0],
        }[to]
        if to == "each other":
            contents["records"].append({**link(contents), "residual": [own, place["layer0.weight"]]})

    ancestor = find_file(paths[1], "ancestor")
    ancestor.rename(tmp_path / "elsewhere")
    edit_contents(paths[1], change)
    (tmp_path / "elsewhere").rename(ancestor)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint):
        load_copy(paths[1], tensors)
    with pytest.raises((independent.Refused, IndexError)):
        independent.Reader(paths[1]).tensor("layer0.weight")


def test_tools(run, tmp_path):
    paths, _, truth = run
    root = tmp_path / "run"
    shutil.copytree(paths[0].parent, root)
    (root / "step-4" / ("f" * 16 + "-00000.dsq")).write_bytes(b"left over")
    assert dsq_json("verify", root)["ok"]
    assert dsq_json("gc", root, "--older-than", "0")["bytes"] == 9
    shutil.rmtree(root / "step-0")
    assert dsq_json("verify", root)["ok"]
    shown = dsq_json("inspect", root / "step-4", "--tensors")
    assert {tensor["name"]: tensor["stored"] for tensor in shown["tensors"]}["layer0.weight"].startswith("weights/")
    assert "delta" in dsq_stdout("inspect", root / "step-4")
    for form, suffix in (("torch", "pt"), ("safetensors", "safetensors")):
        dsq_stdout("export", root / "step-4", tmp_path / f"x.{suffix}", "--format", form)
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(is_equal(exported[fqn], value) for fqn, value in truth[4].items()) and exported["step"] == 4
    with Checkpoint(root / "step-4") as checkpoint, Workers(1, 1 << 20) as workers:
        for _, ref in checkpoint.iter_chunks():
            checkpoint.decode_values(ref, workers)
    flip_bit(find_file(root / "step-4", "ancestor"))
    assert not dsq_json("verify", root, code=1)["ok"]


def test_systems_that_are_made_of_it(tmp_path):
    for system in ("lc", "topn", "scar"):
        states = [state_of(state) for state in make_walk(70, 80, steps=3)]
        paths = chain_of(tmp_path / system, states, {"system": system})
        assert Manifest.read(paths[2]).depth == 2 and json.loads((paths[2] / "manifest.json").read_text())["groups"]
        assert find_differences(load_copy(paths[0], states[0]), states[0]) == []
        back = load_copy(paths[2], states[2])["layer0.weight"]
        assert relative_error(states[2]["layer0.weight"], back) < relative_error(states[2]["layer0.weight"],
                                                                                states[0]["layer0.weight"])


def test_zeros_of_both_signs_are_one(tmp_path):
    """Elements that stay as they are, and zeros that change their sign: differences of +0 and of -0."""
    states = make_walk(70, 80, steps=3)
    for number, state in enumerate(states):
        state[:20] = -0.0 if number else 0.0
        state[20:40] = states[0][20:40]
    paths = chain_of(tmp_path, [state_of(state) for state in states], {"system": "lc"})
    for path, expected in zip(paths, algorithm_1(states), strict=True):
        check(path, state_of(states[0]), state_of(expected))
