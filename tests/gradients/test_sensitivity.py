"""Average gradients: what they are, whoever drives them, and that they never get in the way of training."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dsq_ckpt.gradients import offload
from dsq_ckpt.gradients.sensitivity import GradientAverage, get_named_parameters
from tests.helpers.gradients import BETA, Net, RecordedGradients, make_tokens

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, foreach=True),
    "in place": lambda parameters: WritesToGradients(parameters, {}),
}

pytestmark = pytest.mark.usefixtures("one_thread")


class WritesToGradients(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.mul_(0.01))


def make_average(shape=(3, 4), **options) -> tuple[nn.Parameter, GradientAverage]:
    parameter = nn.Parameter(torch.zeros(shape))
    return parameter, GradientAverage({"w": parameter}, **options)


def count(average: GradientAverage, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    parameter.grad = gradient
    average.capture()
    parameter.grad = None
    average.settle()


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.campaign), 3])
@pytest.mark.parametrize("drive, clip", [
    ("by hand", False), ("manual", False), ("step", False), ("hooks", False),
    ("by hand", True), ("manual", True), ("step", True),  # hooks see gradients before they are clipped
])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_formula(kind, drive, clip, micro):
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    average, recorded = GradientAverage(get_named_parameters(model), BETA), RecordedGradients(model)
    if drive in ("manual", "step"):
        average.attach(optimizer, drive)
    elif drive == "hooks":
        average.attach(optimizer, "manual")
        average.attach_to_parameters(settle=False)
    for step in range(5):
        for part in range(micro):
            (model(make_tokens(10 * step + part)) / micro).backward()
            if drive in ("by hand", "manual"):
                average.capture()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if drive in ("by hand", "manual"):
                average.capture()
        recorded.add()
        optimizer.step()
        if drive == "by hand":
            average.settle()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    recorded.check(average, 5)


def test_gradients_that_never_led_to_a_step_do_not_count():
    parameter, average = make_average()
    count(average, parameter, torch.ones(3, 4))
    parameter.grad = torch.full((3, 4), 7.0)
    average.capture()
    parameter.grad = None
    average.capture()  # zero_grad without a step
    average.settle()
    average.settle()
    assert average.steps == 1 and torch.equal(average.average("w"), torch.ones(3, 4))


def test_optimizers_inside_backward():
    """Their hooks free the gradient; registered earlier, they still run later."""
    model = Net()
    recorded, average = RecordedGradients(model), GradientAverage(get_named_parameters(model), BETA)

    def step(parameter: nn.Parameter) -> None:
        seen[parameter] = parameter.grad.clone()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in trained}
    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in trained]
    average.attach_to_parameters()
    for number in range(4):
        seen: dict[nn.Parameter, torch.Tensor] = {}
        model(make_tokens(number)).backward()
        for parameter, gradient in seen.items():
            parameter.grad = gradient
        recorded.add()
        model.zero_grad()
    recorded.check(average, 4)
    average.detach()
    model(make_tokens(9)).backward()
    recorded.check(average, 4)
    assert all(len(parameter._post_accumulate_grad_hooks) == 1 for parameter in trained) and handles


def test_closures():
    model = Net()
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], max_iter=3)
    average, recorded = GradientAverage(get_named_parameters(model), BETA), RecordedGradients(model)
    average.attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(make_tokens(1))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        recorded.add()
    recorded.check(average, 3)


@pytest.mark.parametrize("kind, drive, unscale", [
    ("fused", "manual", False), ("fused", "manual", True), ("fused", "step", False), ("fused", "step", True),
    ("adamw", "manual", True), ("adamw", "step", False), ("adamw", "step", True),
])
def test_loss_scaling(kind, drive, unscale):
    """Averages are of the unscaled gradients; a batch whose step the scaler refuses does not count."""
    model, plain = Net(), Net()
    optimizer, reference = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](plain.parameters())
    average, recorded = GradientAverage(get_named_parameters(model), BETA), RecordedGradients(plain)
    average.attach(optimizer, drive)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        refused = step == 2
        scaler.scale(model(make_tokens(step))).backward()
        if refused:
            model.up.bias.grad[0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        if drive == "manual":
            average.capture()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not refused:
            plain(make_tokens(step)).backward()
            recorded.add()
            reference.step()
            reference.zero_grad()
    recorded.check(average, 3)
    assert not average.skipped


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_batches_that_are_not_finite_are_left_out(bad, monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_ELEMENTS", 5)
    parameter, average = make_average()
    broken = torch.ones(3, 4)
    broken[2, 3] = bad
    count(average, parameter, broken)
    assert average.average("w") is None and average.skipped == {"w": 1} and average.steps == 0
    count(average, parameter, torch.ones(3, 4))
    count(average, parameter, broken)
    count(average, parameter, torch.full((3, 4), 2.0))
    torch.testing.assert_close(average.average("w"), torch.full((3, 4), 1.9))
    assert average.skipped == {"w": 2} and average.steps == 2
    average.reset()
    assert not average.skipped


def test_extreme_gradients_keep_the_average_finite():
    largest = torch.finfo(torch.float32).max
    parameter, average = make_average()
    for sign in (1, -1, 1, 1, 1):
        count(average, parameter, torch.full((3, 4), sign * largest))
        assert average.average("w").isfinite().all()
    assert average.steps == 5
    double = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    average = GradientAverage({"w": double})
    count(average, double, torch.full((3, 4), 1e300, dtype=torch.float64))  # Inf as fp32
    assert average.average("w") is None and average.skipped == {"w": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    parameter = nn.Parameter(torch.zeros(300, 7, dtype=dtype))
    average = GradientAverage({"w": parameter}, BETA)
    gradients = [torch.randn(300, 7, dtype=torch.float64).to(dtype) for _ in range(3)]
    expected = gradients[0].double()
    for gradient in gradients:
        expected = BETA * gradient.double() + (1 - BETA) * expected
        count(average, parameter, gradient)
    assert average.average("w").dtype == torch.float32
    torch.testing.assert_close(average.average("w").double(), expected, rtol=1e-5, atol=1e-6)
    assert average.memory == 300 * 7 * (4 + dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients(dtype):
    layer = nn.Embedding(50, 4, sparse=True, dtype=dtype)
    average = GradientAverage(get_named_parameters(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    average.attach(optimizer)
    layer(torch.tensor([3, 3, 7])).sum().backward()
    assert layer.weight.grad.is_sparse
    optimizer.step()
    expected = torch.zeros(50, 4)
    expected[3], expected[7] = 2.0, 1.0
    assert torch.equal(average.average("weight"), expected)


def test_strides_do_not_matter(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_ELEMENTS", 7)
    parameter, average = make_average((2, 3, 4, 5))
    gradients = [torch.randn(2, 3, 4, 5) for _ in range(3)]
    count(average, parameter, gradients[0].to(memory_format=torch.channels_last))
    count(average, parameter, gradients[1].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0))
    count(average, parameter, gradients[2])
    expected = 0.9 * gradients[2] + 0.1 * (0.9 * gradients[1] + 0.1 * gradients[0])
    torch.testing.assert_close(average.average("w"), expected)
    squares, elements = average.mean_squares()["w"]
    assert elements == 120 and squares == pytest.approx(float(expected.double().square().sum()), rel=1e-5)


def test_tied_frozen_and_unused_parameters():
    model = Net()
    average = GradientAverage(get_named_parameters(model))
    average.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(make_tokens(0)).backward()
    model.frozen.weight.grad = torch.ones_like(model.frozen.weight)  # left over from before it was frozen
    average.capture()
    average.settle()
    assert average.aliases == {"out.weight": "embed.weight"}
    assert average.average("out.weight") is average.average("embed.weight") is not None
    for name in ("unused.weight", "frozen.weight", "frozen.bias"):
        assert average.average(name) is None
    assert average.mean_squares()["unused.weight"] == (0.0, 0)
    assert "out.weight" in average and "embed.weight" in average and "nothing" not in average
    with pytest.raises(KeyError):
        average.average("nothing")


def test_a_changed_shape_begins_anew():
    parameter, average = make_average()
    count(average, parameter, torch.ones(3, 4))
    parameter.data = torch.zeros(5, 4)
    parameter.grad = torch.full((5, 4), 2.0)
    average.capture()
    with pytest.warns(UserWarning, match="'w' has changed"):
        average.settle()
    assert torch.equal(average.average("w"), torch.full((5, 4), 2.0)) and average.steps == 1
    parameter.grad = None
    parameter.data = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match="'w' has changed"):
        assert average.average("w") is None
    average.capture()
    average.settle()
    assert average.steps == 0


def test_only_the_window_is_captured():
    parameter, average = make_average(window=3, every=10)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    average.attach(optimizer)
    for step in range(1, 31):
        parameter.grad = torch.full((3, 4), float(step))
        optimizer.step()
        if step % 10 == 0:
            assert average.steps == 3 and average.memory > 0
            torch.testing.assert_close(
                average.average("w"), torch.full((3, 4), 0.9 * step + 0.09 * (step - 1) + 0.01 * (step - 2))
            )
            average.reset()
            assert average.average("w") is None and average.memory == 0 and average.steps == 0


def test_several_optimizers():
    """Each settles its own parameters; two steps of one batch are one step of the schedule."""
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    average = GradientAverage({"first": first, "second": second}, window=1, every=4)
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.1)]
    for optimizer in optimizers:
        average.attach(optimizer)
    for step in range(4):
        first.grad, second.grad = torch.full((3,), 1.0 + step), torch.full((4,), 1.0 + step)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(average.average("first"), torch.full((3,), 4.0))
    torch.testing.assert_close(average.average("second"), torch.full((4,), 3.9))  # it began when the first had stepped
    with pytest.raises(ValueError, match="already"):
        average.attach(optimizers[0])
    with pytest.raises(ValueError, match="none of the parameters"):
        average.attach(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    average.detach()
    average.attach(optimizers[0])


def test_nothing_is_kept_alive_or_pickled():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    average = GradientAverage(get_named_parameters(model))
    average.attach(optimizer)
    average.attach_to_parameters(settle=False)
    model(make_tokens(0)).backward()
    optimizer.step()
    for what in (model, optimizer):
        assert b"GradientAverage" not in pickle.dumps(what)
        torch.save(what, io.BytesIO())
    twin = copy.deepcopy(model)
    assert not twin.embed.weight._post_accumulate_grad_hooks
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(average)
    gone = weakref.ref(model)
    del model, optimizer, what
    gc.collect()
    assert gone() is None and average.average("embed.weight") is not None

    optimizer = torch.optim.AdamW(twin.parameters())
    average = GradientAverage(get_named_parameters(twin))
    average.attach(optimizer)
    gone = weakref.ref(average)
    del average
    gc.collect()
    assert gone() is None
    twin(make_tokens(0)).backward()
    optimizer.step()  # its hooks do nothing now


def test_captures_that_never_count_are_reported_once():
    parameter, average = make_average()
    parameter.grad = torch.ones(3, 4)
    average.capture()
    with pytest.warns(UserWarning, match="none counts"):
        assert average.average("w") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average.average("w")


def test_names():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 3))
    model[1].module = nn.Linear(3, 3)
    names = get_named_parameters(torch.compile(model))
    assert set(names) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "_orig_mod.1.module.weight", "_orig_mod.1.module.bias",
    }
    assert names["1.weight"] is model[1].weight


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 1.5}, {"window": 0}, {"every": 0}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError):
        make_average(**options)
