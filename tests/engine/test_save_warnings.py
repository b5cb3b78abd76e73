"""Warnings of a save that no other test names."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(sizes)))


@pytest.mark.parametrize("state, model, warned", [
    ({"encoder": net(128, 128, 128).state_dict()}, nn.ModuleDict({"decoder": net(128, 128)}), True),
    ({"table": torch.randn(64, 128)}, net(128, 128), True),
    ({"a": {"b": net(128, 128).state_dict()}}, net(128, 128), False),  # below other keys
    ({"average": net(128, 128).state_dict(), "table": torch.randn(64, 128)}, net(128, 128), False),
    ({"0.lora_A.weight": torch.randn(64, 128)}, nn.ModuleList([nn.ModuleDict(
        {"base": nn.Linear(128, 128), "lora_A": nn.ModuleDict({"default": nn.Linear(128, 64)})}
    )]), False),  # as PEFT names adapters in their state dict
    ({"net": net(8, 8).state_dict(), "table": torch.randn(64, 128)}, net(8, 8), False),  # small, and so exact
    ({"net": net(8, 8).state_dict()}, nn.ModuleDict({"other": net(8, 8)}), False),  # nothing is lossy
])
def test_a_model_of_other_names_is_reported(tmp_path, state, model, warned):
    """Its frozen weights and buffers were lossy, without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):  # a delta has nothing to add
            dsq_ckpt.save({**state, "step": number}, tmp_path / str(number), model=model)
    messages = [str(warning.message) for warning in caught if "has nothing of what is saved" in str(warning.message)]
    assert len(messages) == warned


def test_a_warning_names_keys_of_model_and_state_dict(tmp_path):
    model = nn.ModuleDict({"decoder": net(128, 128)})
    with pytest.warns(UserWarning, match=r"decoder\.0\.bias, decoder\.0\.weight there, encoder\.w in the state dict"):
        dsq_ckpt.save({"encoder": {"w": torch.randn(128, 128)}}, tmp_path / "a", model=model)


@pytest.mark.parametrize("key", ["opt", "state", "exp_avg"])
def test_weights_below_a_module_named_like_an_optimizers_state_are_reported(tmp_path, key):
    """They are exact where no model is given: once for a run, and not if a rule says so."""
    model = nn.ModuleDict({key: net(128, 128), "head": net(128, 64)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model[key](torch.randn(32, 128))).square().mean().backward()
    optimizer.step()
    rule = {"quantize": {"rules": [{"pattern": "model.*.0.weight", "exact": True}]}}
    exact = {"quantize": {"weights": {"method": "exact"}}}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for name, more, expected in (
        ("none", {}, 1), ("model", {"model": model}, 0), ("rule", {"config": rule}, 0), ("exact", {"config": exact}, 0),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = dsq_ckpt.SaveHistory()
            for number in range(2):
                dsq_ckpt.save(state, tmp_path / name / str(number), history=history, **more)
        messages = find_messages(f"'model.{key}.0.weight' is stored exactly, as state of an optimizer", caught)
        assert len(messages) == expected, name
        assert not find_messages("has its shape", caught)
    with pytest.warns(UserWarning, match=f"'{key}.0.weight' is stored exactly, as state of an optimizer"):
        dsq_ckpt.save(model.state_dict(), tmp_path / "flat")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save({"net": net(128, 128).state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "other")
        moments = {name: torch.randn_like(weight) for name, weight in net(128, 128).state_dict().items()}
        dsq_ckpt.save({"model": net(128, 128).state_dict(), "opt_state": {"mu": moments}}, tmp_path / "by_name")
    assert not find_messages("stored exactly, as state", caught)


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net(128, 128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 128)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def find_messages(text: str, told: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in told if text in str(warning.message)]


def test_data_that_comes_later_is_reported(tmp_path):
    """A replay buffer that was empty at the keyframe, with columns in other units."""
    model, optimizer = trained()
    compressor = dsq_ckpt.Compressor(model, optimizer)
    units = torch.logspace(-5, 0, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            compressor.save(tmp_path / str(number), extra={"replay": torch.randn(150 * min(number, 2), 20) * units})
            assert len(find_messages("'replay' lies beside the model", caught)) == (number >= 3)  # exact before
            assert len(find_messages("columns of replay", caught)) == (number >= 3)


@pytest.mark.parametrize("background", [False, True])
def test_a_mask_that_becomes_data_is_reported(tmp_path, background):
    """Zeros and ones were stored exactly, and normal numbers in their place are not."""
    model, optimizer = trained()
    compressor = dsq_ckpt.Compressor(model, optimizer)
    table = (torch.randn(90, 90) > 0).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            if number >= 2:
                table = torch.randn(90, 90)
            outcome = compressor.save(tmp_path / str(number), extra={"table": table}, background=background)
            if background:
                outcome.result()
            assert len(find_messages("'table' lies beside the model", caught)) == (number >= 2)


@pytest.mark.parametrize("how", ["names", "numbers"])
def test_tensors_that_the_optimizer_does_not_know_are_exact_or_reported(tmp_path, how):
    """A frozen layer and a buffer, where no model is given; an average of the weights has their shapes.

    A warning names what has changed, and is lossy from then on.
    """
    model, optimizer = trained()
    model.append(nn.Linear(64, 200).requires_grad_(False))
    model.register_buffer("queue", torch.randn(80, 70))
    late = torch.randn(100, 99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            weights, by_name = get_state_dict(model, optimizer)
            state = {
                "model": weights, "optimizer": by_name if how == "names" else optimizer.state_dict(),
                "average": {name: value.clone() for name, value in weights.items() if name.startswith(("0.", "1."))},
                **({"late": late} if number else {}),
            }
            dsq_ckpt.save(state, tmp_path / str(number))
            target = {"model": {}, "late": torch.zeros(100, 99)} if number else {"model": {}}
            dsq_ckpt.load(target, tmp_path / str(number))
            off = {name for name, value in weights.items() if not value.equal(target["model"][name])}
            assert off == {"0.weight", "1.weight"} | ({"queue"} if number >= 1 else set())
            assert number == 0 or target["late"].equal(late) == (number < 2)
            for tensor in (model[0].weight.data, model[1].weight.data, model.queue, late):
                tensor += 0.01 * torch.randn_like(tensor)
        dsq_ckpt.save(state, tmp_path / "with a model", model=model, parent=None)
        dsq_ckpt.save({"model": weights}, tmp_path / "without an optimizer", parent=None)
    assert [text.split(" is quantized")[0] for text in find_messages("no state of the optimizer", caught)] == [
        "'model.queue'", "'late'",
    ]


def test_weights_whose_state_is_none_of_adams_are_trained(tmp_path, recwarn):
    """RMSprop and Adafactor for a layer, AdamW for another."""
    for first in (torch.optim.RMSprop, torch.optim.Adafactor):
        model = net(128, 100, 64)
        optimizers = [first(model[0].parameters()), torch.optim.AdamW(model[1].parameters())]
        model(torch.randn(32, 128)).square().mean().backward()
        state = {"model": model.state_dict()}
        for number, optimizer in enumerate(optimizers):
            optimizer.step()
            state[f"optimizer_{number}"] = optimizer.state_dict()
        dsq_ckpt.save(state, tmp_path / first.__name__)
    assert not find_messages("no state of the optimizer", list(recwarn))


@pytest.mark.parametrize("searched", [False, True])
def test_data_beside_the_model_is_reported(tmp_path, searched):
    """Observations are quantized like weights once they change; numbers of tokens are exact, also in a search."""
    model, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    extra = {
        "replay": {"seen": torch.randn(64, 128), "tokens": torch.arange(8192.0).view(64, 128) - 1},
        "average": average.module.state_dict(),  # by the names of the model
    }
    batch = torch.randn(16, 128)
    compressor = dsq_ckpt.Compressor(
        model, optimizer, evaluate=(lambda: float(model(batch).detach().square().mean())) if searched else None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            compressor.save(tmp_path / str(number), extra=extra)
            extra["replay"]["seen"] += 1 - number
    messages = [str(warning.message) for warning in caught if "lies beside the model" in str(warning.message)]
    assert len(messages) == 1 and messages[0].startswith("'replay.seen' lies")
    back = {"replay": {}}
    dsq_ckpt.load(back, tmp_path / "1")
    assert back["replay"]["tokens"].equal(extra["replay"]["tokens"])
    assert not back["replay"]["seen"].equal(extra["replay"]["seen"])


@pytest.mark.parametrize("elements", [6400, 640000])
def test_data_beside_the_model_does_not_change_the_steps_of_its_weights(tmp_path, elements):
    """Steps by the size of gradients were dropped for all where less than half of the elements had gradients."""
    model, optimizer = trained()
    data = {"data": torch.randn(elements // 80, 80)}
    alone = dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a" / "0")
    beside = dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "b" / "0", extra=data)
    names = [f"model.{number}.weight" for number in (0, 1)]
    scales = []
    for result in (alone, beside):
        with Checkpoint(result.path) as checkpoint:
            scales.append([checkpoint.index["exponents"].get(name, 0) for name in names])
    assert scales[0] == scales[1] and any(scales[0])
