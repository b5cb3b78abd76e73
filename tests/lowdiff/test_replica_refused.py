"""What a replica refuses, and says why."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD

from dsq_ckpt.errors import CheckpointExists, ConfigError
from dsq_ckpt.lowdiff import Replica, recover
from tests.lowdiff.loops import ADAM, Case, Loop, perceptron, seeded
from tests.lowdiff.workers.replica import known_holders, replica_of

pytestmark = pytest.mark.usefixtures("one_thread")
holders = pytest.fixture(known_holders)


class Mine(SGD):
    """An optimizer of the user's."""


class Knowing(SGD):
    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.seen = 3


def main_class() -> type:
    kind = type("Scripted", (SGD,), {"__module__": "__main__"})
    sys.modules["__main__"].Scripted = kind
    return kind


def local_class() -> type:
    class Local(SGD):
        pass

    return Local


def test_gradients_of_another_dtype(tmp_path, holders):
    """They do not fit where the replica has its own."""
    model = perceptron()
    if not hasattr(model[0].weight, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameter's dtype only")
    optimizer = SGD(model.parameters(), 0.1)
    with Replica(tmp_path, model, optimizer):
        model[0].weight.grad_dtype = torch.bfloat16
        model(torch.ones(3, 12)).sum().backward()
        with pytest.raises(ConfigError, match=r"gradient of '0\.weight' is torch\.bfloat16.*float32"):
            optimizer.step()


class Outer:
    class Inner(SGD):
        pass


@pytest.mark.parametrize(("kind", "says"), [
    (main_class, "Scripted cannot be made in another process: its class cannot be imported"),
    (local_class, "cannot be imported"),
    (lambda: Outer.Inner, "cannot be imported"),
    (lambda: Knowing, r"it has attributes of its own \(seen\)"),
])
def test_optimizers_that_cannot_be_made_again(tmp_path, kind, says):
    model = perceptron()
    with pytest.raises(ConfigError, match=says):
        Replica(tmp_path, model, kind()(model.parameters(), lr=0.1))
    assert not list(tmp_path.glob("step-*"))


def test_refused(tmp_path, holders):
    loop = Loop(ADAM)
    with pytest.raises(ConfigError, match="LBFGS cannot be logged: it calls the model several times"):
        Replica(tmp_path, loop.model, LBFGS(loop.model.parameters()))
    for options in ({"persist_every": 0}, {"queue": 1}, {"keep": 0}, {"hook": (None, default_hooks.allreduce_hook)}):
        with pytest.raises(ConfigError):
            replica_of(loop, tmp_path, **options)
    for number in range(2):  # and training is as it was
        loop.step(number)
    with replica_of(loop, tmp_path) as replica:
        with pytest.raises(ConfigError, match="closure"):
            loop.optimizer.step(lambda: 0.0)
        loop.optimizer.zero_grad()
        loop.step(0)
        replica.step()
    with pytest.raises(CheckpointExists, match="resume="):
        replica_of(loop, tmp_path)
    assert recover(tmp_path, loop.model, loop.optimizer).step == 1


def test_parameters_that_share_memory(tmp_path):
    """A replica of them would have the memory twice, and each in the state of one."""
    model = perceptron()
    model[3].weight = nn.Parameter(model[0].weight.detach().t())
    with pytest.raises(ConfigError, match=r"two parameters of the optimizer share memory.*Use GradientLog"):
        Replica(tmp_path, model, SGD(model.parameters(), 0.1))


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.argmax(1)) - x


def test_sparse_gradients(tmp_path, holders):
    loop = Loop(Case(lambda m: SGD(m.parameters(), 0.1), model=lambda s: seeded(s, Looked)))
    with replica_of(loop, tmp_path), pytest.raises(ConfigError, match=r"'table.weight' is .*sparse"):
        loop.step(0)


@pytest.mark.usefixtures("alone_under_ddp")
def test_a_model_that_has_a_hook(tmp_path):
    loop = Loop(ADAM)
    loop.model = DistributedDataParallel(loop.model)
    loop.model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ConfigError, match=r"give the other one as hook="):
        replica_of(loop, tmp_path)
