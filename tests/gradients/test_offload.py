"""Copies to the host. What CUDA must be told is checked on a recording of the calls; a GPU runs the rest."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsq_ckpt.gradients import offload
from dsq_ckpt.gradients.sensitivity import GradientAverage

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recording:
    """Stands in for torch.cuda, and for tensors on it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: torch.device) -> SimpleNamespace:
        self.calls.append(f"stream {device}")

        def record_event() -> str:
            self.calls.append("event")
            return "event"

        return SimpleNamespace(
            name="side", record_event=record_event, wait_stream=lambda other: self.calls.append(f"wait {other.name}")
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="main", wait_event=lambda event: self.calls.append(f"main waits for {event}"))

    @contextmanager
    def stream(self, stream: SimpleNamespace):
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append("back")

    def pair(self, name: str, device: str):
        def keep(stream: SimpleNamespace) -> None:
            self.calls.append(f"keep {name} for {stream.name}")

        source = SimpleNamespace(device=torch.device(device), record_stream=keep)
        target = SimpleNamespace(
            copy_=lambda source, non_blocking=False: self.calls.append(f"copy {name}, returns at once: {non_blocking}")
        )
        return source, target


def test_the_order_of_calls(monkeypatch):
    recording, streams = Recording(), {}
    monkeypatch.setattr(offload.torch, "cuda", recording)
    pairs = [recording.pair("a", "cuda:0"), recording.pair("b", "cpu"), recording.pair("c", "cuda:0")]
    arrivals = offload.copy(pairs, streams)
    assert recording.calls == [
        "stream cuda:0", "wait main", "on side",
        "copy a, returns at once: True", "keep a for side", "copy c, returns at once: True", "keep c for side",
        "event", "back", "copy b, returns at once: False",
    ]
    assert arrivals == ((torch.device("cuda:0"), "event"),)
    recording.calls.clear()
    offload.wait_on_device(arrivals)
    assert recording.calls == ["main waits for event"]
    recording.calls.clear()
    offload.copy([recording.pair("d", "cuda:0"), recording.pair("e", "cuda:1")], streams)
    assert [call for call in recording.calls if call.startswith("stream")] == ["stream cuda:1"]


class Event:
    """A CUDA event that happens when told, or when waited for."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


@pytest.mark.parametrize("overlap", ["none", "step", "batch"])
def test_averages_wait_for_their_copies(monkeypatch, overlap):
    """Nothing is averaged before its event, and everything before it is asked for or its buffer is used again."""
    parameter = nn.Parameter(torch.zeros(3))
    average = GradientAverage({"w": parameter}, overlap=overlap)
    events: list[Event] = []
    waits: list[Event] = []

    def copy_later(pairs, streams):
        assert all(event.happened for event in events), "the buffer is still awaited"
        for source, target in pairs:
            target.copy_(source)
        events.append(Event())
        return ((torch.device("cuda:0"), events[-1]),)

    monkeypatch.setattr(offload, "copy", copy_later)
    monkeypatch.setattr(offload, "wait_on_device", lambda arrivals: waits.extend(event for _, event in arrivals))
    entry = average._entries["w"]
    for step in range(3):
        parameter.grad = torch.full((3,), 1.0 + step)
        average.capture()
        assert waits == (events if overlap == "none" else events[:-1] if overlap == "step" else [])
        average.settle()
        assert entry.steps == step and entry.state == "counted"
        assert waits == ([] if overlap == "batch" else events)
    assert torch.allclose(average.average("w"), torch.full((3,), 2.89)) and events[-1].happened
    parameter.grad = torch.zeros(3)
    average.capture()
    events[-1].happened = True
    average.settle()
    assert entry.steps == 4 and entry.state == "empty", "what has arrived is averaged at once"


@needs_cuda
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_training_on_a_gpu(set_to_none, fused):
    """Gradients large enough to be in flight while the step and the next batch run."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    average = GradientAverage(dict(model.named_parameters()))
    average.attach(optimizer)
    expected: dict[str, torch.Tensor] = {}
    for _ in range(6):
        model(torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.float()
            expected[name] = gradient if name not in expected else 0.9 * gradient + 0.1 * expected[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    for name, parameter in model.named_parameters():
        assert average._entries[name].staged.is_pinned() and average.steps == 6
        torch.testing.assert_close(average.average(name), expected[name].cpu(), rtol=1e-4, atol=1e-8)
        assert parameter.is_cuda


@needs_cuda
def test_a_scaler_on_a_gpu():
    """The verdict of the scaler arrives with the gradients."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    average = GradientAverage(dict(model.named_parameters()))
    average.attach(optimizer)
    scaler = torch.amp.GradScaler(init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 64, device="cuda")).sum()).backward()
        if step == 1:
            model.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert average.steps == 2
    torch.testing.assert_close(average.average("bias"), torch.full((64,), 4.0))
