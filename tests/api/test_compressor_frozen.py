"""Parameters without gradients are exact; with `Compressor(frozen=False)` they are left out, by all their names."""

import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.odd_optimizers import HiddenStateAdamW, train_on_noise
from tests.helpers.training import compute_loss, train, train_model


def test_frozen_parameters_are_exact_beside_what_is_searched(tmp_path):
    model, _ = train_model()
    model.embed.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, 60, 70)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    for name in ("a", "b"):
        compressor.save(tmp_path / name)
        hidden, frozen = model.hidden.weight.detach().clone(), model.embed.weight.detach().clone()
        train(model, optimizer, 70, 80)
        with torch.no_grad():
            model.embed.weight.zero_()
        compressor.load(tmp_path / name)
        assert model.embed.weight.equal(frozen) and not model.hidden.weight.equal(hidden)
    assert compressor.quality is not None and compressor.quality["satisfied"]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_frozen_parameters_can_be_left_out(tmp_path, with_optimizer):
    model, _ = train_model()
    model.embed.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, 60, 70)
    used = optimizer if with_optimizer else None
    compressor = dsq_ckpt.Compressor(model, used, evaluate=lambda: compute_loss(model), frozen=False)
    compressor.save(tmp_path / "a")
    names = set(dsq_ckpt.DSQStorageReader(tmp_path / "a").read_metadata().state_dict_metadata)
    assert "model.hidden.weight" in names and not any("embed" in name for name in names)
    hidden, frozen = model.hidden.weight.detach().clone(), model.embed.weight.detach().clone()
    train(model, optimizer, 70, 80)
    moved = (model.hidden.weight - hidden).norm()
    compressor.load(tmp_path / "a")
    assert model.embed.weight.equal(frozen) and (model.hidden.weight - hidden).norm() < moved / 4
    whole = dsq_ckpt.Compressor(model, used)
    with pytest.raises(dsq_ckpt.DSQError, match=r"model.embed.weight"):
        whole.load(tmp_path / "a")


def test_weights_that_are_trained_by_turns_are_not_left_out_in_silence(tmp_path):
    """As adapters of which one is on at a time; the optimizer's state of all is saved."""
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, frozen=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.save(tmp_path / "0")
    model.embed.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"has state of are not saved: 'embed\.weight' need no gradient"):
        compressor.save(tmp_path / "1")


def test_weights_trained_by_an_inner_optimizer_are_not_left_out_in_silence(tmp_path):
    """The optimizer around it has no state of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = HiddenStateAdamW(model.parameters())
    train_on_noise(model, optimizer, 2)
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"has state of are not saved: '0\.bias', '0\.weight' need no gradient"):
        dsq_ckpt.Compressor(model, optimizer, frozen=False).save(tmp_path / "0")


@pytest.mark.parametrize("saved", ["with frozen=False", "with state", "without the optimizer"])
def test_weights_that_were_trained_at_the_save_and_are_frozen_at_the_load_come_back(tmp_path, saved):
    """Their optimizer state came back, and they stayed as they were, without a word."""
    model, optimizer = train_model()
    used = None if saved == "without the optimizer" else optimizer
    dsq_ckpt.Compressor(model, used, config="exact", frozen=saved == "with state").save(tmp_path / "a")
    other, other_optimizer = train_model(1)
    other.requires_grad_(False)
    other.hidden.requires_grad_(used is not None)  # a load for inference needs no gradient at all
    other_used = None if used is None else other_optimizer
    before = other.embed.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.Compressor(other, other_used, frozen=False).load(tmp_path / "a")
    assert not other.embed.weight.equal(before)
    assert all(value.equal(model.state_dict()[name]) for name, value in other.state_dict().items())


def test_frozen_parameters_are_left_out_by_all_their_names(tmp_path):
    linear = torch.nn.Linear
    model = torch.nn.Sequential(torch.nn.Embedding(64, 64), linear(64, 64), linear(64, 64, bias=False))
    model[2].weight = model[0].weight.requires_grad_(False)
    compressor = dsq_ckpt.Compressor(model, frozen=False)
    compressor.save(tmp_path / "a")
    assert set(dsq_ckpt.DSQStorageReader(tmp_path / "a").read_metadata().state_dict_metadata) == {
        "model.1.weight", "model.1.bias"
    }
    dsq_ckpt.Compressor(model).save(tmp_path / "whole")
    with torch.no_grad():
        frozen = model[0].weight.fill_(1).clone()
    compressor.load(tmp_path / "whole")
    assert model[0].weight.equal(frozen)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="all of the model is frozen"):
        compressor.load(tmp_path / "whole")


def test_weights_that_were_left_out_and_are_others_at_the_load_are_named(tmp_path):
    """Adapters on another base model cost 0.1 of the loss without a word."""
    def build(seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        base = torch.nn.ModuleList(torch.nn.Linear(80, 80) for _ in range(2)).to(dtype).requires_grad_(False)
        return torch.nn.ModuleDict({"base": base, "adapter": torch.nn.Linear(80, 80)})

    model = build()
    dsq_ckpt.Compressor(model, frozen=False).save(tmp_path / "a")
    dsq_ckpt.Compressor(build(0)).save(tmp_path / "whole")
    assert not Manifest.read(tmp_path / "whole").excluded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.Compressor(build(), frozen=False).load(tmp_path / "a")
        dsq_ckpt.Compressor(build(1), frozen=False).load(tmp_path / "whole")
        dsq_ckpt.Compressor(build(1, torch.bfloat16), frozen=False).load(tmp_path / "a")  # rounded: none has its dtype
    other = build(1)
    with torch.no_grad():
        other["base"][0].load_state_dict(model["base"][0].state_dict())
    with pytest.warns(UserWarning, match=r"'base\.1\.bias', 'base\.1\.weight' of this model have other .* of 4 "):
        dsq_ckpt.Compressor(other, frozen=False).load(tmp_path / "a")
    assert not other["base"][1].weight.equal(model["base"][1].weight)


def test_checksums_of_weights_left_out_are_few(tmp_path):
    """A manifest has 64 of a model of a thousand tensors, spread evenly; a merge keeps them."""
    model = torch.nn.ModuleDict({"base": torch.nn.ParameterList(torch.full((2,), float(at)) for at in range(1000))})
    model.requires_grad_(False)["adapter"] = torch.nn.Linear(80, 80)
    compressor = dsq_ckpt.Compressor(model, frozen=False)
    for step in range(3):
        with torch.no_grad():
            model["adapter"].weight.add_(0.01 * torch.randn(80, 80))
        compressor.save(tmp_path / f"{step}")
    texts = Manifest.read(tmp_path / "2").excluded
    names = sorted(f"base.{number}" for number in range(1000))
    assert sorted(texts) == [names[number * 1000 // 64] for number in range(64)] and len(set(texts.values())) == 64
    dsq_ckpt.merge(tmp_path / "2", tmp_path / "merged")
    assert Manifest.read(tmp_path / "merged").excluded == texts
