"""Restores one after the other: none adds to what the first changed, or takes back what training has moved since."""

from __future__ import annotations

import warnings
from unittest import mock

import measure_restores
import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.quantization import restored_values as restored_weights
from tests.helpers.states import load_copy, read_bits, relative_error

LAYERS = {
    "wide.weight": (512, 128), "tall.weight": (64, 700), "stacked.weight": (4, 96, 64), "turned.weight": (300, 90),
    "small.weight": (64, 64),
}


def weights(dtype=torch.float32):
    """Layers of several shapes, sizes and layouts, one with rows of zeros."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.01 * 2**number).to(dtype)
        for number, (name, shape) in enumerate(LAYERS.items())
    }
    state["tall.weight"][:20] = 0
    state["turned.weight"] = state["turned.weight"].t()
    return state


def layouts(state):
    return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in state.items()}


@pytest.mark.parametrize(("config", "dtype"), [
    pytest.param(None, torch.float32, id="deltas"), pytest.param(None, torch.bfloat16, id="deltas, bfloat16"),
    pytest.param({"delta": {"enabled": False}}, torch.float32, id="keyframes"),
    pytest.param({"quantize": {"granularity": "tensor"}}, torch.float32, id="by tensor"),
    pytest.param({"delta": {"enabled": False}}, torch.bfloat16, id="keyframes, bfloat16", marks=pytest.mark.campaign),
    pytest.param({"quantize": {"granularity": "tensor"}}, torch.bfloat16, id="by tensor, bfloat16",
                 marks=pytest.mark.campaign),
])
def test_restored_state_is_saved_as_it_is(tmp_path, config, dtype):
    """Eight times, with nothing trained between: it ends as near to the first as one restore is, and as long."""
    first = state = weights(dtype)
    errors = []
    for number in range(8):
        dsq_ckpt.save(state, tmp_path / str(number), config=config)
        state = load_copy(tmp_path / str(number), state)
        errors.append({name: relative_error(state[name].double(), first[name].double()) for name in first})
    for name, tensor in first.items():
        assert errors[-1][name] < 1.05 * errors[0][name], name
        length = float((state[name].double() * tensor).sum() / tensor.double().square().sum())
        assert abs(length - 1) < 1e-3, name
    assert not state["tall.weight"][:20].any()


def test_a_save_that_fails_forgets_no_load(tmp_path):
    model, fails = nn.Linear(128, 96), False
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 128)
    model(batch).square().mean().backward()
    optimizer.step()

    def evaluate():
        if fails:
            raise KeyboardInterrupt
        with torch.no_grad():
            return float(model(batch).square().mean())

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    compressor.save(tmp_path / "0")
    compressor.load(tmp_path / "0")
    fails = True
    with pytest.raises(KeyboardInterrupt):
        compressor.save(tmp_path / "1")
    fails = False
    compressor.save(tmp_path / "1")
    assert read_bits(tmp_path / "1")["optimizer.state.weight.exp_avg"] == 8


MOMENTS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}


WAYS = {
    "each save": (1, False, False), "each third save": (3, False, False),
    "going on in another directory": (1, True, False), "by another history": (1, False, True),
}
"""Saves before each restore, whether each restore goes on in a directory of its own, and by a history of its own."""


def momentum(trained):
    """The first moments or momentum of an optimizer of one tensor."""
    (own,) = trained.state.values()
    return own["momentum_buffer" if "momentum_buffer" in own else "exp_avg"]


@pytest.mark.parametrize(("optimizer", "way"), [
    *(("adam", way) for way in WAYS), ("sgd", "each save"),
    *(pytest.param("sgd", way, marks=pytest.mark.campaign) for way in WAYS if way != "each save"),
])
def test_first_moments_that_were_restored_are_saved_as_they_are(tmp_path, optimizer, way):
    """Ten times, with no step between: neither do their errors add up, nor do they grow."""
    def make():
        model = nn.Linear(300, 200, bias=False)
        return model, MOMENTS[optimizer](model.parameters())

    saves, elsewhere, other = WAYS[way]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, trained = make()
        for _ in range(20):
            model.weight.grad = torch.randn(200, 300) * torch.logspace(-1, 1, 300)
            trained.step()
    first, errors = momentum(trained).clone(), []
    for number in range(10):
        run = tmp_path / (f"run-{number}" if elsewhere else "run")
        for save in range(saves):
            dsq_ckpt.save({"model": model, "optimizer": trained}, run / f"{number}-{save}")
        model, trained = make()
        dsq_ckpt.load({"model": model, "optimizer": trained}, run / f"{number}-{saves - 1}",
                      history=dsq_ckpt.SaveHistory() if other else None)
        errors.append(relative_error(momentum(trained), first))
    assert errors[-1] < 1.2 * errors[0] < 0.36, errors
    assert 0.9 < float((momentum(trained) * first).sum() / first.square().sum()) < 1.1


def test_first_moments_take_more_bits_until_they_are_renewed(tmp_path):
    """After a load: while a layer rests, or rows of it; and no longer than that."""
    def make():
        model = nn.ModuleDict({name: nn.Linear(128, 96, bias=False) for name in ("rests", "trains", "rare")})
        return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)

    def train(steps):
        for _ in range(steps):
            for name, layer in model.items():
                if name != "rests" or restless:
                    layer.weight.grad = torch.randn(96, 128, generator=generator)
            trained.step()
            trained.zero_grad()

    def bits(name):
        dsq_ckpt.save({"model": model, "optimizer": trained}, tmp_path / name)
        return {count for fqn, count in read_bits(tmp_path / name).items() if "momentum_buffer" in fqn}

    generator, restless = torch.Generator().manual_seed(0), True
    model, trained = make()
    train(10)
    assert bits("0") == bits("1") == {4}
    model, trained = make()
    dsq_ckpt.load({"model": model, "optimizer": trained}, tmp_path / "1")
    restless = False
    train(20)
    assert bits("2") == {8}
    for name in ("3a", "3b", "3c"):
        train(20)
        assert bits(name) == {8}  # of all in the group
    restless = True
    train(20)
    rows = trained.state[model["rare"].weight]["momentum_buffer"][:9].clone()
    assert bits("4") == {4}
    train(20)
    assert bits("5") == {4}
    dsq_ckpt.load({"model": model, "optimizer": trained}, tmp_path / "5")
    for name in ("6", "7"):
        train(20)
        trained.state[model["rare"].weight]["momentum_buffer"][:9] = rows
        assert bits(name) == {8}
    train(20)
    assert bits("8") == {4}


def test_first_moments_are_renewed_over_several_saves(tmp_path):
    """They take more bits no longer than that where saves are closer together than momentum lasts."""
    model = nn.Linear(128, 96, bias=False)
    optimizer, all_bits = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9), []
    for number in range(6):
        for _ in range(4):
            model.weight.grad = torch.randn(96, 128, generator=torch.Generator().manual_seed(number))
            optimizer.step()
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / str(number))
        all_bits += [bits for name, bits in read_bits(tmp_path / str(number)).items() if "momentum_buffer" in name]
        if number == 0:
            dsq_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "0")
    assert all_bits == [4, 8, 8, 4, 4, 4]


def test_fresh_weights_that_are_all_in_bf16_are_spread(tmp_path):
    dsq_ckpt.save({name: tensor.float() for name, tensor in weights(torch.bfloat16).items()}, tmp_path / "0")
    assert set(read_bits(tmp_path / "0").values()) == {4}


def test_a_load_by_another_history_counts(tmp_path):
    """As any load in this process does: weights may come from another run."""
    state = weights()
    for number in range(2):
        dsq_ckpt.save(state, tmp_path / "run" / str(number))
    state = layouts(state)
    dsq_ckpt.load(state, tmp_path / "run" / "1", history=dsq_ckpt.SaveHistory())
    dsq_ckpt.save(state, tmp_path / "run" / "2")
    assert set(read_bits(tmp_path / "run" / "2").values()) == {8}


def test_small_movements_after_a_restore_are_kept(tmp_path):
    """A tenth of a part, the same for all elements of a tensor or by a direction of each."""
    dsq_ckpt.save(weights(), tmp_path / "0")
    restored = load_copy(tmp_path / "0", weights())
    generator = torch.Generator().manual_seed(1)
    for number in (1, 2, 3):
        moved = layouts(restored)
        steps = {}
        for name, tensor in moved.items():
            part = relative_error(restored[name], weights()[name]) * tensor.std() * 12**0.5
            signs = torch.randn(tensor.shape, generator=generator).sign()
            steps[name] = 0.1 * part * (signs if number > 1 else 1) * (tensor != 0)
            tensor += steps[name]
        dsq_ckpt.save(moved, tmp_path / str(number))
        after = load_copy(tmp_path / str(number), moved)
        for name, step in steps.items():
            share = float(((after[name] - restored[name]) * step).sum() / step.square().sum())
            assert 0.9 < share < 1.1, (number, name)
        restored = after


def test_only_what_is_not_spread_takes_more_bits(tmp_path):
    """Fresh weights, and those that training has moved by more than a part, have the bits that are asked for."""
    state = weights()
    dsq_ckpt.save(state, tmp_path / "0")
    assert set(read_bits(tmp_path / "0").values()) == {4}
    state = load_copy(tmp_path / "0", state)
    dsq_ckpt.save(state, tmp_path / "1")
    assert set(read_bits(tmp_path / "1").values()) == {8}
    generator = torch.Generator().manual_seed(1)
    moved = {name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
             for name, tensor in state.items()}
    dsq_ckpt.save(moved, tmp_path / "2")
    assert set(read_bits(tmp_path / "2").values()) == {4}
    for without in ({"refinement_bits": 0}, {"refinement_bits": 8}):
        dsq_ckpt.save(state, tmp_path / "3", config={"quantize": {"weights": without}}, overwrite=True)
        assert set(read_bits(tmp_path / "3").values()) == {without["refinement_bits"]}


def test_more_bits_of_what_lies_in_few_places_take_no_more_bytes(tmp_path):
    """A save at once after a restore."""
    state = {"w": torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))}
    sizes = []
    for number in range(2):
        dsq_ckpt.save(state, tmp_path / str(number), config={"delta": {"enabled": False}})
        sizes.append(sum(file.stat().st_size for file in (tmp_path / str(number)).glob("*.refinement")))
        state = load_copy(tmp_path / str(number), state)
    assert read_bits(tmp_path / "1") == {"w": 8} and 0 < sizes[1] < 1.01 * sizes[0]


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_restored_state_takes_more_bits_whatever_it_has(tmp_path, bits):
    """And fresh weights as many as are asked for."""
    config = {"quantize": {"weights": {"refinement_bits": bits}}}
    dsq_ckpt.save(weights(), tmp_path / "0", config=config)
    assert set(read_bits(tmp_path / "0").values()) == {bits}
    restored = load_copy(tmp_path / "0", weights())
    dsq_ckpt.save(restored, tmp_path / "1", config=config)
    again, bits_by_name = load_copy(tmp_path / "1", restored), read_bits(tmp_path / "1")
    assert set(bits_by_name.values()) in ({8}, {0, 8})
    assert all(relative_error(again[name], tensor) < (0.005 if bits_by_name[name] else 1e-9)  # without: as it is
               for name, tensor in restored.items())


@pytest.mark.parametrize("between", ["exact", "nan"])
def test_a_save_that_does_not_look_tells_nothing(tmp_path, between):
    """Between a restore and the next save: exact, or with NaN in a tensor, which is stored exactly then."""
    dsq_ckpt.save(weights(), tmp_path / "0")
    restored = load_copy(tmp_path / "0", weights())
    other = layouts(restored)
    if between == "nan":
        other["wide.weight"][3, 3] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the NaN
        dsq_ckpt.save(other, tmp_path / "1", config="exact" if between == "exact" else None)
    dsq_ckpt.save(restored, tmp_path / "2")
    assert read_bits(tmp_path / "2")["wide.weight"] == 8


def test_a_look_that_has_no_memory_tells_nothing(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restored_weights, "_measure_chunk", mock.Mock(side_effect=torch.OutOfMemoryError("of a device")))
        dsq_ckpt.save(weights(), tmp_path / "0")
    assert set(read_bits(tmp_path / "0").values()) == {8}


@pytest.mark.parametrize("way", ["save", "async_save", "quantize"])
def test_views_of_every_second_element_are_saved_as_their_copies_are(tmp_path, way):
    """As the real part of complex weights: flat, they have a stride."""
    generator = torch.Generator().manual_seed(0)
    views = {
        "real": torch.randn(80, 80, generator=generator, dtype=torch.complex64).real,
        "columns": torch.randn(64, 160, generator=generator)[:, ::2],
        "half": torch.randn(64, 90, 2, generator=generator).bfloat16()[..., 0],
    }
    copies = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    assert all(view.reshape(-1).stride() == (2,) for view in views.values())
    for folder, state in (("views", views), ("copies", copies)):
        if way == "async_save":
            dsq_ckpt.async_save(state, tmp_path / folder / "0").result()
        else:
            config = {"storage": {"stage": "quantize"}} if way == "quantize" else None
            dsq_ckpt.save(state, tmp_path / folder / "0", config=config)
    loaded, expected = (load_copy(tmp_path / folder / "0", copies) for folder in ("views", "copies"))
    assert all(loaded[name].equal(expected[name]) for name in copies)


def test_the_look_is_the_same_without_the_compiler():
    """As with NUMBA_DISABLE_JIT=1, where codes are NumPy's 8-bit numbers, by any number of parts."""
    kernel = restored_weights._sum_part_waves
    rng = np.random.default_rng(0)
    codes, low, parts = rng.integers(100, 256, 2000, dtype=np.uint8), np.arange(256.0) - 128, 4
    values = (low[codes] + rng.random(2000)).astype(np.float32)
    arguments = values, codes, 1.0, low, np.full(256, float(parts)), parts, restored_weights._WAVES
    compiled = kernel(*arguments)
    assert compiled[2] > 500
    assert getattr(kernel, "py_func", kernel)(*arguments) == pytest.approx(compiled)


def test_a_look_at_moments_that_has_no_memory_tells_nothing(tmp_path):
    """Whether it is the first, or one after others."""
    def state(seed):
        seeds = {"w": 0, "w.momentum_buffer": 1 + seed}
        return {
            name: torch.randn(90, 100, generator=torch.Generator().manual_seed(seed)) for name, seed in seeds.items()
        }

    def bits(number):
        dsq_ckpt.save(state(number), tmp_path / str(number))
        return read_bits(tmp_path / str(number))["w.momentum_buffer"]

    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("of a device"))
    assert bits(0) == 4
    load_copy(tmp_path / "0", state(0))
    sample = restored_weights._sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restored_weights, "_sample", out_of_memory)
        assert bits(1) == 8
        patch.setattr(restored_weights, "_sample", sample)
        assert bits(2) == 8
        patch.setattr(restored_weights, "_sample", out_of_memory)
        assert bits(3) == 8
    assert bits(4) == 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2))])
@pytest.mark.usefixtures("one_thread")
def test_a_second_restore_costs_no_more_than_the_first(tmp_path, seed):
    """Late in a schedule, ten steps after the first: it cost 2.5 to 4.3 % of the loss once."""
    costs = measure_restores.twice(seed, tmp_path, steps=60)["costs"]
    assert len(costs) == 2 and all(abs(cost) < 0.005 for cost in costs), costs
