"""Compressors: what they leave of one gradient, and (in `workers/compressors.py`) of those of many ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dsq_ckpt
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.lowdiff.compressors import GradientCompressor, gradient_compressor
from dsq_ckpt.lowdiff.kmeans import dequantize_shard, quantize_shard
from dsq_ckpt.lowdiff.topk import largest_indices
from tests.helpers.processes import torchrun

WORKERS = Path(__file__).parent / "workers"
CHECKS = (
    "topk_follows_the_oracle", "topk_survives_rebuilt_buckets", "topk_of_channels_last", "traces_hold_and_ranks_agree",
    "kmeans_conserves_across_rebuilds", "mean_is_right_in_the_long_run", "residuals_of_unused_parameters_wait",
    "accumulation_without_synchronization", "a_loaded_state_goes_on_bit_for_bit", "nan_reaches_all_ranks",
    "compressors_take_turns",
)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_ranks(ranks):
    output = torchrun("compressors", ranks, workers=WORKERS)
    assert [line[5:] for line in output.splitlines() if line.startswith("[ok] ")] == list(CHECKS)


@pytest.mark.parametrize(
    ("given_spec", "normal"),
    [
        ("topk:0.01", "topk:0.01"), ("topk", "topk:0.01"), ("TOPK:1e-2, feedback=on", "topk:0.01"),
        ("topk:1", "topk:1"),
        ("topk:0.05,feedback=off", "topk:0.05,feedback=off"), ("topk:0.12345678", "topk:0.12345678"),
        ("kmeans", "kmeans:16"), ("kmeans:256", "kmeans:256"), ("kmeans:2,feedback=off", "kmeans:2,feedback=off"),
        ("fp16", "fp16"), ("bf16", "bf16"), ("none", "none"), (None, "none"),
    ],
)
def test_specs_are_normalised(given_spec, normal):
    compressor = gradient_compressor(given_spec)
    assert compressor.spec == normal and compressor.name == normal.partition(":")[0]
    assert gradient_compressor(compressor.spec).spec == normal
    assert gradient_compressor(compressor) is compressor


def test_former_names_are_read_with_a_warning():
    """`dsq_ckpt.Compressor` is another class, so `dsq_ckpt.lowdiff` has one name for each."""
    with pytest.warns(DeprecationWarning, match="is now dsq_ckpt.lowdiff.GradientCompressor"):
        assert dsq_ckpt.lowdiff.Compressor is GradientCompressor
    with pytest.warns(DeprecationWarning, match="is now dsq_ckpt.lowdiff.gradient_compressor"):
        assert dsq_ckpt.lowdiff.compressor is gradient_compressor
    with pytest.raises(AttributeError, match="no attribute 'compressors_of'"):
        _ = dsq_ckpt.lowdiff.compressors_of


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("topq:0.01", ["there is no 'topq'", "topk, kmeans, fp16, bf16, none", "did you mean 'topk'?"]),
        ("topk:0", ["ratio is '0'", "above 0 and up to 1"]), ("topk:1.5", ["'1.5'"]), ("topk:nan", ["'nan'"]),
        ("topk:many", ["'many'"]), ("topk:", ["nothing after the colon"]), ("kmeans:1", ["'1'", "from 2 to 256"]),
        ("kmeans:257", ["'257'"]), ("kmeans:16.5", ["'16.5'"]), ("fp16:3", ["'fp16' takes no argument", "'3'"]),
        ("none:1", ["'none' takes no argument", "'1'"]), ("bf16,feedback=on", ["'bf16' has no option 'feedback'"]),
        (
            "topk:7,feedbak=off,feedback=maybe",
            ["ratio is '7'", "no option 'feedbak'", "did you mean 'feedback'?", "feedback is 'maybe', expected on"],
        ),
        ("topk:0.1,feedback=on,feedback=off", ["given twice"]), ("", ["there is no ''"]),
        (0.01, ["is 0.01", "a string"]),
    ],
)
def test_wrong_specs_are_explained_at_once(spec, parts):
    with pytest.raises(ConfigError) as error:
        gradient_compressor(spec)
    assert all(part in str(error.value) for part in parts), error.value


def check_largest(x: torch.Tensor, k: int) -> None:
    """As torch.topk up to the choice among equal magnitudes."""
    indices = largest_indices(x, k)
    assert indices.dtype == torch.int64 and len(indices) == len(indices.unique()) == k
    expected = torch.topk(x.abs(), k).values
    torch.testing.assert_close(x[indices].abs().sort(descending=True).values.nan_to_num(nan=torch.inf),
                               expected.nan_to_num(nan=torch.inf), rtol=0, atol=0)
    assert int(x[indices].isnan().sum()) == int(expected.isnan().sum())
    assert torch.equal(indices, largest_indices(x.clone(), k))


@given(st.lists(FLOATS, min_size=1, max_size=60), st.data())
@settings(max_examples=150, deadline=None)
def test_largest_of_anything(values, data):
    x = torch.tensor(values, dtype=torch.float32)
    check_largest(x, data.draw(st.integers(1, len(values))))


def many(kind: str, n: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    if kind == "heavy":
        return x**5
    if kind == "ties":
        return x.round()
    if kind == "sorted":
        return x.sort().values
    if kind == "zeros":
        return x * (torch.arange(n) % 997 == 0)
    if kind == "hidden":  # from a sample of every so many elements
        return x * torch.where(torch.arange(n) % (n // 4096) == 1, 100.0, 0.01)
    if kind == "shown":
        return x * torch.where(torch.arange(n) % (n // 4096) == 0, 100.0, 0.01)
    if kind == "nan":
        return x.masked_fill(torch.arange(n) % 50 == 3, torch.nan)
    assert kind == "infinite"
    return x.masked_fill(torch.arange(n) % 500 == 3, -torch.inf)


@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.1, 0.24])
@pytest.mark.parametrize("kind", ["heavy", "ties", "sorted", "zeros", "hidden", "shown", "nan", "infinite"])
def test_largest_of_many_is_exact(kind, ratio):
    for n in (16384, 70001):
        check_largest(many(kind, n), max(1, round(ratio * n)))


def gradients(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module whose parameters are of these shapes, and which has no gradients yet."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    return module


def backward(module: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Known gradients."""
    loss = torch.zeros(())
    known = {}
    for number, (name, p) in enumerate(module.named_parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        known[name] = torch.randn(p.shape, generator=generator).pow(3).to(p.dtype)
        loss = loss + (p * known[name]).sum()
    loss.backward()
    return known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sent_and_kept_elements_make_the_whole(dtype):
    module = gradients((30, 20), (7,), (0, 5), (), (3, 4, 5), dtype=dtype)
    topk = gradient_compressor("topk:0.05")
    topk.attach(module)
    residuals = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
    for step in range(6):
        module.zero_grad()
        known = backward(module, step)
        infos = topk.take()
        for name, p in module.named_parameters():
            whole = residuals[name] + known[name].float()
            left = topk.state()[name]
            assert left.dtype == torch.float32 and p.grad.dtype == dtype
            if p.numel() == 0:
                continue
            sent = torch.where(left == 0, whole, 0)  # in float32, before the gradient's dtype rounds it
            assert torch.equal(sent + left, whole)
            assert torch.equal(p.grad, sent.to(dtype))
            support = infos[p].support
            assert len(support) == max(1, round(0.05 * p.numel()))
            assert set(sent.reshape(-1).nonzero().view(-1).tolist()) <= set(support.tolist())
            residuals[name] = left.clone()


@pytest.mark.parametrize("spec", ["topk:0.3", "fp16", "bf16", "kmeans:8"])
def test_traces_of_a_plain_module(spec):
    module = gradients((40, 30), (5,), (0,), (2, 6, 4, 4))
    module.p3.data = module.p3.data.to(memory_format=torch.channels_last)
    compressor = gradient_compressor(spec)
    compressor.attach(module)
    for step in range(3):
        module.zero_grad()
        known = backward(module, step)
        infos = compressor.take()
        assert compressor.take() == {}
        for name, p in module.named_parameters():
            flat, info = p.grad.reshape(-1), infos[p]
            if not p.numel():
                assert info.probe is None
                continue
            places, values = info.probe
            assert torch.equal(flat[places], values) and 0 < len(places) <= 64
            if compressor.name == "topk":
                covered = torch.zeros(len(flat), dtype=torch.bool)
                covered[info.support] = True
                assert not flat[~covered].any()
            elif compressor.name == "kmeans":
                assert torch.isin(flat, info.levels).all() and len(info.levels) <= 8
            else:
                assert info.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[spec]
                assert torch.equal(p.grad, known[name].to(info.dtype).float())
            if compressor.name != "topk":
                assert flat.abs().max() == values.abs().max()


def test_channels_last_is_as_row_major():
    one, other = gradients((8, 6, 4, 4), (5, 3)), gradients((8, 6, 4, 4), (5, 3))
    other.p0.data = other.p0.data.to(memory_format=torch.channels_last)
    other.p1.data = torch.randn(3, 5).t()
    compressors = [gradient_compressor("topk:0.1"), gradient_compressor("topk:0.1")]
    for module, topk in zip((one, other), compressors, strict=True):
        topk.attach(module)
        for step in range(3):
            module.zero_grad()
            backward(module, step)
    taken = [topk.take() for topk in compressors]
    for name in ("p0", "p1"):
        a, b = getattr(one, name), getattr(other, name)
        assert torch.equal(a.grad, b.grad) and torch.equal(compressors[0].state()[name], compressors[1].state()[name])
        assert set(taken[0][a].support.tolist()) == set(taken[1][b].support.tolist())


def test_accumulated_gradients_are_compressed_again():
    module = gradients((50, 10))
    gradient_compressor("topk:0.02,feedback=off").attach(module)
    first = backward(module, 0)["p0"]
    sent_gradient = module.p0.grad.clone()
    second = backward(module, 1)["p0"]
    whole = (sent_gradient + second).reshape(-1)
    expected = torch.zeros_like(whole)
    expected[whole.abs().topk(10).indices] = whole[whole.abs().topk(10).indices]
    assert torch.equal(module.p0.grad.reshape(-1), expected)
    assert int((sent_gradient != 0).sum()) == 10 and not torch.equal(sent_gradient, first)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=200), st.sampled_from([2, 3, 16, 256]))
@settings(max_examples=100, deadline=None)
def test_quantized_values_are_levels(values, most):
    x = np.array(values, np.float32)
    levels, codes = quantize_shard(x, most)
    decoded = dequantize_shard(codes, levels)
    assert 1 <= len(levels) <= most and (np.diff(levels) > 0).all() and 0 in levels
    assert np.isin(decoded, levels).all() and not decoded[x == 0].any()
    # Bins are decided as a whole: the nearest level, up to their width of 1/64.
    error, least = np.abs(x - decoded), np.abs(x[:, None] - levels).min(1, initial=np.inf)
    assert (error <= least + np.abs(x) / 30).all()


def test_quantized_is_near_the_best():
    x = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    levels, codes = quantize_shard(x, 16)
    error = np.mean((x - dequantize_shard(codes, levels)) ** 2)
    assert error < 1.2 * 0.009497  # Max (1960): Lloyd-Max at 16 levels, none of which is zero


@pytest.mark.parametrize("spec", ["topk:0.1", "kmeans:4", "fp16", "bf16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_stay_visible(spec, value):
    module = gradients((20, 10))
    compressor = gradient_compressor(spec)
    compressor.attach(module)
    (module.p0[3, 4] * value).backward()
    assert not module.p0.grad.isfinite().all()
    info = compressor.take()[module.p0]
    assert info.levels is None
    assert all(residual.isfinite().all() for residual in compressor.state().values())


def small_training(spec: str | None, steps: int) -> float:
    torch.manual_seed(7)
    x = torch.randn(256, 10)
    y = torch.sin(x @ torch.randn(10, 2))
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 2))
    gradient_compressor(spec).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("steps", [100, pytest.param(300, marks=pytest.mark.campaign)])
def test_training_reaches_about_the_same_loss(one_thread, steps):
    plain = small_training(None, steps)
    losses = {spec: small_training(spec, steps) for spec in ("topk:0.05", "kmeans:4", "bf16", "topk:0.05,feedback=off")}
    print(plain, losses)
    assert max(losses["topk:0.05"], losses["kmeans:4"], losses["bf16"]) < 1.1 * plain
    assert losses["topk:0.05"] < losses["topk:0.05,feedback=off"]


@pytest.mark.parametrize("spec", ["topk:0.05", "kmeans:4"])
def test_a_loaded_state_goes_on_bit_for_bit(spec):
    module = gradients((30, 20), (7,))
    compressor = gradient_compressor(spec)
    compressor.attach(module)
    assert {name: list(r.shape) for name, r in compressor.state().items()} == {"p0": [30, 20], "p1": [7]}
    for step in range(3):
        module.zero_grad()
        backward(module, step)
    residuals, again = {name: r.clone() for name, r in compressor.state().items()}, copy.deepcopy(module)
    other = gradient_compressor(spec)
    other.attach(again)
    other.load_state(residuals)
    for each in (module, again):
        each.zero_grad()
        backward(each, 3)
    for p, q in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert all(torch.equal(residual, other.state()[name]) for name, residual in compressor.state().items())


def test_a_state_that_does_not_fit_is_refused():
    topk = gradient_compressor("topk:0.1")
    with pytest.raises(ConfigError, match=r"before attach\(\)"):
        topk.state()
    topk.attach(gradients((4, 5), (3,)))
    with pytest.raises(LoadFailed) as error:
        topk.load_state({"p0": torch.ones(5, 4), "q": torch.ones(1)})
    assert all(part in str(error.value) for part in (
        "'topk:0.1'", "p1 is missing", "q is not expected", "p0 has shape [5, 4], expected [4, 5]",
    ))
    assert not topk.state()["p0"].any()
    for spec in ("none", "fp16", "topk:0.1,feedback=off"):
        without: GradientCompressor = gradient_compressor(spec)
        without.attach(gradients((4,)))
        assert without.state() == {}
        without.load_state({})
        with pytest.raises(LoadFailed, match="p0 is not expected"):
            without.load_state({"p0": torch.ones(4)})


def test_detached_gradients_are_left_alone():
    module = gradients((20, 10))
    topk = gradient_compressor("topk:0.01")
    topk.attach(module)
    with pytest.raises(ConfigError, match="attached to a model already"):
        topk.attach(module)
    backward(module, 0)
    topk.detach()
    assert topk.take() == {}
    module.zero_grad()
    known = backward(module, 1)
    assert torch.equal(module.p0.grad, known["p0"]) and topk.take() == {}
    topk.attach(module)
    assert not topk.state()["p0"].any()


def test_frozen_and_shared_parameters():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    module[2].weight.requires_grad_(False)
    topk = gradient_compressor("topk:0.1")
    topk.attach(module)
    module(torch.ones(1, 8)).sum().backward()
    assert set(topk.take()) == {module[0].weight, module[2].bias}
    assert set(topk.state()) == {"0.weight", "2.bias"}


def test_gradients_that_cannot_be_compressed():
    with pytest.raises(ConfigError, match=r"p0 is torch\.complex64"):
        gradient_compressor("topk:0.1").attach(gradients((3,), dtype=torch.complex64))
    embedding = nn.Embedding(10, 4, sparse=True)
    gradient_compressor("topk:0.1").attach(embedding)
    with pytest.raises(ConfigError, match="weight has sparse gradients"):
        embedding(torch.tensor([1])).sum().backward()
