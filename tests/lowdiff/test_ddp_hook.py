"""DDP's communication hook: compressors and replicas take turns, under torch.compile too, and say who has it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.compressors import gradient_compressor
from dsq_ckpt.lowdiff.streamer import GradientStreamer
from dsq_ckpt.lowdiff.train_state import TrainState
from tests.lowdiff.loops import Case, Loop
from tests.lowdiff.workers.replica import check_same, known_holders, replica_of, restored, until

pytestmark = pytest.mark.usefixtures("one_thread", "alone_under_ddp")
holders = pytest.fixture(known_holders)
CASE = Case(lambda model: Adam(model.parameters(), 0.01))


def ddp(**options) -> Loop:
    loop = Loop(CASE)
    loop.model = DistributedDataParallel(loop.model, **options)
    return loop


def train(loop: Loop, steps: range) -> None:
    for number in steps:
        loop.step(number)


def follow(loop: Loop, run, holders, steps: int) -> None:
    """A replica of the loop has what it has, and every step was handed over by DDP's hook."""
    buckets = []
    with replica_of(loop, run) as replica:
        streamer = replica._streamer
        called = streamer.on_bucket
        streamer.on_bucket = lambda *args: buckets.append(1) or called(*args)
        for number in range(steps):
            loop.step(number)
            replica.step()
        until(lambda: holders[-1].applied == steps)
        check_same(restored(CASE, run, holders[-1]), loop)
    assert len(buckets) >= steps


def test_compressors_take_turns(tmp_path, holders):
    loop = ddp(bucket_cap_mb=0.0005)
    topk = gradient_compressor("topk:0.5")
    for turn in range(2):
        topk.attach(loop.model)
        train(loop, range(2))
        assert topk.take()
        topk.detach()
        follow(loop, tmp_path / str(turn), holders, 3)
    alone = ddp()
    train(loop, range(3))
    alone.model.load_state_dict(loop.model.state_dict())
    loop.optimizer.zero_grad()
    for training in (loop, alone):
        training.model(torch.ones(2, 12)).square().sum().backward()
    for mine, other in zip(loop.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), "without an owner it averages"


def test_a_compiled_model(tmp_path, holders):
    """DDP under torch.compile hands over by buckets too."""
    loop = ddp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        loop.model = torch.compile(loop.model, backend="eager")
        follow(loop, tmp_path, holders, 3)
    torch._dynamo.reset()


def test_errors_name_the_owner_of_the_hook():
    loop = ddp()
    first = gradient_compressor("topk:0.5")
    first.attach(loop.model)
    with pytest.raises(ConfigError, match=r"this model has compressor 'topk:0.5.*' already; detach or"):
        gradient_compressor("fp16").attach(loop.model)
    streamer = GradientStreamer(TrainState(loop.model, loop.optimizer), None, ())
    with pytest.raises(ConfigError, match="this model has compressor 'topk"):
        streamer.attach()
    first.detach()
    streamer.attach()
    with pytest.raises(ConfigError, match="this model has a replica already"):
        first.attach(loop.model)
    streamer.detach()
    first.attach(loop.model)
    first.detach()


def test_somebody_elses():
    loop = ddp()
    loop.model.register_comm_hook(None, allreduce_hook)
    streamer = GradientStreamer(TrainState(loop.model, loop.optimizer), None, ())
    with pytest.raises(ConfigError, match=r"a replica cannot be the communication hook .* give the other one as hook="):
        streamer.attach()
    streamer.detach()
    with pytest.raises(ConfigError, match=r"compressor 'fp16' cannot be .* leave out the other one. DDP says: "):
        gradient_compressor("fp16").attach(loop.model)


def test_inside_of_something():
    """Gradients would be seen before DDP has averaged them."""
    outer = nn.Sequential(DistributedDataParallel(nn.Linear(3, 3)))
    streamer = GradientStreamer(TrainState(outer, Adam(outer.parameters())), None, ())
    with pytest.raises(ConfigError, match="Sequential contains a DistributedDataParallel: give that to the replica"):
        streamer.attach()
    streamer.detach()
