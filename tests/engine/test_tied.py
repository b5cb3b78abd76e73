"""Weights that share memory are stored once; layers that do not change cost next to nothing."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.engine.tied import share_memory
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import find_differences, load_copy, relative_error
from tests.helpers.training import Tied, compute_loss, make_batch


def trained(model, steps=30):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        tokens, targets = make_batch(step)
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("how", ["save", "copy", "quantize", "compressor"])
def test_tied_weights_are_stored_once(tmp_path, how):
    model = Tied()
    optimizer = trained(model)
    if how == "compressor":
        dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model)).save(tmp_path / "a")
    elif how == "save":
        dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "a", model=model)
    else:
        config = {"storage": {"stage": how}}
        dsq_ckpt.async_save({"model": model.state_dict()}, tmp_path / "a", model=model, config=config).result()
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == 4 * (128 * 96 + 96 * 96)
    got = {"model": Tied(1, tied=False).state_dict()}
    dsq_ckpt.load(got, tmp_path / "a")
    assert torch.equal(got["model"]["head.weight"], got["model"]["embed.weight"])
    assert float((got["model"]["head.weight"] - model.head.weight).norm() / model.head.weight.norm()) < 0.2
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "b", model=model)
    # After the compressor's, weights alone are less than half of what was saved, and so a state of their own.
    assert Manifest.read(tmp_path / "b").depth == (how != "compressor")


def test_two_tensors_of_equal_values_are_not_tied(tmp_path):
    state = {"a.weight": torch.randn(64, 80), "b.weight": torch.empty(64, 80)}
    state["b.weight"].copy_(state["a.weight"])
    dsq_ckpt.save(state, tmp_path / "a")
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == 2 * 4 * 64 * 80


class Temporaries(DefaultSavePlanner):
    """Makes what it is asked for, and keeps none of it: the next may lie where the last one lay."""

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.detach().half().float() if type(data) is torch.Tensor else data


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("background", [False, True])
def test_memory_given_to_the_next_is_no_tie(tmp_path, background):
    state = {f"layer{n}.weight": torch.randn(64, 80) for n in range(6)}
    state |= {f"layer{n}.bias": torch.full((80,), 1.0 + n) for n in range(6)}
    writer = DSQStorageWriter(tmp_path / "a")
    if background:
        dcp.async_save(state, storage_writer=writer, planner=Temporaries(), no_dist=True).result()
    else:
        dcp.save(state, storage_writer=writer, planner=Temporaries(), no_dist=True)
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == 6 * 4 * 64 * 80
    back = load_copy(tmp_path / "a", state)
    assert all(relative_error(value, back[name]) < 0.05 for name, value in state.items())


@pytest.mark.parametrize("how", ["save", "copy", "quantize"])
@pytest.mark.parametrize("exact", ["small", "*embed.weight", "*head.weight"])
def test_tied_weights_that_are_exact(tmp_path, how, exact):
    """Because they are small, or by a rule that names one of them, the first or the second."""
    value = torch.randn(8, 64) if exact == "small" else torch.randn(128, 96)
    state = {"embed.weight": value, "hidden.weight": torch.randn(96, 96), "head.weight": value}
    config = {"quantize": {"rules": [{"pattern": exact, "exact": True}]}}
    if how == "save":
        dsq_ckpt.save(state, tmp_path / "a", config=config)
    else:
        dsq_ckpt.async_save(state, tmp_path / "a", config={**config, "storage": {"stage": how}}).result()
    kinds = Manifest.read(tmp_path / "a").kinds
    assert (kinds["weights"].logical, kinds["exact"].logical) == (4 * 96 * 96, 4 * value.numel())
    assert find_differences(load_copy(tmp_path / "a", state), state) == ["hidden.weight"]


def test_a_frozen_backbone_that_is_lossy_costs_next_to_nothing(tmp_path):
    model = Tied(tied=False)
    trained(model)
    model.embed.requires_grad_(False)
    model.hidden.requires_grad_(False)
    config = {"quantize": {"weights": {"refinement_bits": 0}, "frozen": "lossy"}}
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "0", model=model, config=config)
    everything = Manifest.read(tmp_path / "0").kinds["weights"].base
    frozen = {"model": {k: v for k, v in model.state_dict().items() if not k.startswith("head")}}
    dsq_ckpt.save(frozen, tmp_path / "only" / "0", model=model, config=config)
    trained(model, 5)
    dsq_ckpt.save(frozen, tmp_path / "only" / "1", model=model, config=config)
    cost = Manifest.read(tmp_path / "only" / "1").kinds["weights"].base
    assert cost < everything / 200, (cost, everything)
    got = {"model": {k: torch.zeros_like(v) for k, v in frozen["model"].items()}}
    dsq_ckpt.load(got, tmp_path / "only" / "1")
    assert float((got["model"]["embed.weight"] - model.embed.weight).norm() / model.embed.weight.norm()) < 0.3


def moments(name, first, scale=1.0):
    return {f"state.{name}.exp_avg": first, f"state.{name}.exp_avg_sq": scale * torch.rand(first.shape) ** 2}


VALUE, HALF = torch.randn(128, 96), torch.randn(128, 96).bfloat16()
SECOND_EXACT = {"rules": [{"pattern": "second*", "exact": True}]}
SHARED = {
    "another view": ({"first.weight": VALUE, "second.weight": VALUE.t()}, SECOND_EXACT),
    "a part": ({"first.weight": VALUE, "second.weight": VALUE[32:]}, SECOND_EXACT),
    "a moment": ({"first.exp_avg": VALUE, "second.weight": VALUE}, SECOND_EXACT),
    "momentum": ({"state.first.momentum_buffer": VALUE, "second.weight": VALUE}, {}),
    "momentum in bf16": (
        {"second.weight": HALF, "state.first.momentum_buffer": HALF}, {"momentum": {"method": "bf16"}}
    ),
    "bf16 of fp32": (
        {"second.weight": VALUE, "state.first.momentum_buffer": VALUE}, {"momentum": {"method": "bf16"}}
    ),
    "units of their own": (moments("first", VALUE) | moments("second", VALUE, 1e-8), {}),
}


@pytest.mark.parametrize("how", ["save", "copy", "quantize"])
@pytest.mark.parametrize("case", SHARED)
def test_memory_of_several_names_is_stored_as_the_strictest_asks(tmp_path, how, case):
    """Else a load into tied tensors leaves in them what the laxer name gave, if that comes last."""
    state, quantize = SHARED[case]
    state = {**state, "other.weight": torch.randn(96, 96)}
    if how == "save":
        dsq_ckpt.save(state, tmp_path / "a", config={"quantize": quantize})
    else:
        config = {"quantize": quantize, "storage": {"stage": how}}
        dsq_ckpt.async_save(state, tmp_path / "a", config=config).result()
    lossy = {name for name in state if name.startswith("other") or name.endswith("exp_avg_sq")}
    assert set(find_differences(load_copy(tmp_path / "a", state), state)) == lossy


@pytest.mark.parametrize("part", [
    lambda whole: whole[:, :48], lambda whole: whole[::2, ::2], lambda whole: whole.diagonal(),
    lambda whole: whole.as_strided((40, 40), (192, 2)), lambda whole: torch.view_as_complex(whole.view(96, 64, 2)).real,
])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_view_with_gaps_is_as_exact_as_what_it_is_a_view_of(tmp_path, part, names):
    """In whichever order a load into tied tensors writes the same memory."""
    config = {"quantize": {"rules": [{"pattern": "*whole*", "exact": True}], "min_elements": 16}}
    value = VALUE.clone()
    state = dict(sorted({f"{names[0]}.whole.weight": value, f"{names[1]}.view.weight": part(value)}.items()))
    dsq_ckpt.save(state, tmp_path / "a", config=config)
    value.zero_()
    dsq_ckpt.load(state, tmp_path / "a")
    assert torch.equal(value, VALUE)


@pytest.mark.parametrize("first", ["embed", "head"])
def test_more_refinement_for_one_of_the_names_is_for_all(tmp_path, first):
    names = sorted(["embed.weight", "head.weight"], key=lambda name: not name.startswith(first))
    state = dict.fromkeys(names, VALUE) | {"hidden.weight": torch.randn(96, 96)}
    dsq_ckpt.save(state, tmp_path / "a", config={"quantize": {"groups": {"embedding": {"refinement_bits": 8}}}})
    got = load_copy(tmp_path / "a", state)
    assert all(0 < relative_error(VALUE, got[name]) < 0.001 for name in names)


def test_names_without_an_own_rule_share_their_codes(tmp_path):
    state = {**moments("a", VALUE), "w.weight": VALUE.clone()}
    for name, other in {"u.weight": "w.weight", "state.b.exp_avg": "state.a.exp_avg"}.items():
        state[name] = state[other]
    state["state.b.exp_avg_sq"] = state["state.a.exp_avg_sq"]
    dsq_ckpt.save(state, tmp_path / "a")
    kinds = Manifest.read(tmp_path / "a").kinds
    assert {kind: sizes.logical for kind, sizes in kinds.items()} == dict.fromkeys(
        ("weights", "exp_avg", "exp_avg_sq"), 4 * VALUE.numel()
    )


@pytest.mark.parametrize("how", ["save", "async_save", "dcp", "compress"])
@pytest.mark.parametrize("names", [("z", "zc"), ("zc", "z")])
def test_a_lazy_conjugate_has_values_of_its_own(tmp_path, how, names):
    """A lazy conjugate, or a negated view, shares memory and strides with its base."""
    z = torch.complex(VALUE, VALUE.flip(0))
    views = {"z": z, "zc": z.conj(), "im": z.imag, "of zc": z.conj().imag, "x": VALUE, "-x": torch._neg_view(VALUE)}
    state = {name: views[name] for name in (*names, *views)}
    if how == "compress":
        dsq_ckpt.compress(state, tmp_path / "a")
    elif how == "dcp":
        dcp.save(state, storage_writer=DSQStorageWriter(tmp_path / "a"))
    elif how == "async_save":
        dsq_ckpt.async_save(state, tmp_path / "a").result()
    else:
        dsq_ckpt.save(state, tmp_path / "a")
    got = {}
    dsq_ckpt.load(got, tmp_path / "a")
    assert torch.equal(got["z"], z) and torch.equal(got["zc"], z.conj())
    assert all(relative_error(value, got[name]) < 0.1 for name, value in state.items())


def test_which_tensors_share_memory():
    memory = torch.zeros(6, 4)
    assert not share_memory([torch.zeros(9, device="meta"), torch.ones(9, device="meta"), torch.eye(3).to_sparse()])
    assert share_memory([memory, memory.t()]) and share_memory([memory[3:], torch.zeros(2), memory])
    assert share_memory([memory[0], memory[:2], memory[5]]), "of one, another begins within the first"
    assert not share_memory([memory[:3], memory[3:], memory[:0], torch.zeros(6, 4)]) and not share_memory([])
