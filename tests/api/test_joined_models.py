"""Several models as one: what a save is told of them, by all their names, and for how long."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.api.joined_models import join_models
from dsq_ckpt.quantization.frozen_tensors import find_frozen, frozen_from_history
from dsq_ckpt.quantization.groups import layer_types
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights


class BitLinear(nn.Linear):
    """A layer whose weights its name says to be rounded."""


def trainings():
    """A generator with a codebook, its average and a discriminator, as in a GAN, and their optimizers."""
    torch.manual_seed(0)
    models = {
        "G": nn.Sequential(nn.Embedding(100, 96), BitLinear(96, 96), nn.Linear(96, 128), nn.LayerNorm(128)),
        "D": nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 64)),
    }
    models["G"].register_buffer("codebook", torch.randn(300, 32))
    models["D"][0].weight.requires_grad_(False)
    models["G"][2].weight.manifold = "Sphere"
    models["mean"] = copy.deepcopy(models["G"]).requires_grad_(False)
    optimizers = {f"{name} opt": torch.optim.AdamW([
        parameter for parameter in models[name].parameters() if parameter.requires_grad
    ]) for name in "GD"}
    return models, optimizers


def train(models, optimizers):
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    models["G"].codebook.lerp_(torch.randn(300, 32), 0.05)
    for mean, own in zip(models["mean"].parameters(), models["G"].parameters(), strict=True):
        mean.data.lerp_(own.data, 0.1)


def test_one_model_is_itself_and_several_tell_what_their_tree_does():
    models, _ = trainings()
    assert join_models([("G", models["G"])]) is models["G"]
    several, tree = join_models([*models.items()]), nn.ModuleDict(models)
    find_frozen(several)
    find_frozen(tree)
    assert layer_types(several) == layer_types(tree) and layer_types(several)["G.2.weight"] == "manifold"
    assert find_rounded_weights(several) == find_rounded_weights(tree) and find_rounded_weights(several)["G.1.weight"]
    frozen = frozen_from_history(several)
    assert frozen == frozen_from_history(tree) and "D.0.weight" in frozen and "G.codebook" in frozen
    unnamed = join_models([("", models["G"]), ("model_1", models["D"])])
    assert {"0.weight", "codebook", "model_1.0.weight"} <= layer_types(unnamed).keys()


def test_a_parameter_of_two_models_has_both_names():
    one, other = BitLinear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    told = find_rounded_weights(join_models([("a", one), ("b", other)]))
    assert told == {"a.weight": True, "a.bias": True, "b.weight": True, "b.bias": False}


def test_they_are_the_same_as_long_as_they_live_and_are_let_go():
    models, _ = trainings()
    given = [*models.items()]
    several = join_models(given)
    assert join_models(given) is several and join_models(given[:2]) is not several and join_models(given) is several
    assert join_models([("other", given[0][1]), *given[1:]]) is not several
    references = [weakref.ref(model) for model in (several, *models.values())]
    last = models.pop("mean")
    del given, several, models
    gc.collect()
    assert [reference() for reference in references[:-1]] == [None] * 3 and last is references[-1]()


def test_a_join_of_deleted_models_is_not_taken_for_another():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    several = join_models([("a", first), ("b", second)])
    del second
    gc.collect()
    again = join_models([("a", first), ("b", nn.Linear(8, 8))])
    assert again is not several and set(layer_types(several)) == {"a.weight", "a.bias"}


@pytest.mark.parametrize("how", ["save", "copy", "quantize"])
def test_several_modules_are_stored_as_their_tree_is(how, tmp_path):
    """Rounded and frozen weights and buffers exactly, moving averages as weights: bit by bit what the tree restores."""
    models, optimizers = trainings()
    runs = [tmp_path / "several", tmp_path / "tree"]
    tree = nn.ModuleDict(models)
    history = {run: dsq_ckpt.SaveHistory() for run in runs}
    for number in range(4):
        train(models, optimizers)
        results = []
        for run, given in zip(runs, (models, {name: net.state_dict() for name, net in models.items()}), strict=True):
            state, path = {**given, **optimizers, "step": number}, run / f"step-{number}"
            options = {"model": None if run is runs[0] else tree, "history": history[run]}
            if how == "save":
                results.append(dsq_ckpt.save(state, path, **options))
            else:
                config = {"storage": {"stage": how}}
                results.append(dsq_ckpt.async_save(state, path, config=config, **options).result())
        targets = {run: {} for run in runs}
        for run, state in targets.items():
            dsq_ckpt.load(state, run / f"step-{number}", history=dsq_ckpt.SaveHistory())
        one, other = targets.values()
        for name, model in models.items():
            for key in model.state_dict():
                assert one[name][key].equal(other[name][key]), (number, name, key)
        assert all(one["G"][key].equal(models["G"].state_dict()[key]) for key in ("1.weight", "2.weight", "codebook"))
        assert one["D"]["0.weight"].equal(models["D"][0].weight)
        assert not one["D"]["1.weight"].equal(models["D"][1].weight)
        assert one["mean"]["0.weight"].equal(models["mean"][0].weight) == (number < 2)  # it is seen to move
        assert results[0].bytes_logical == results[1].bytes_logical
