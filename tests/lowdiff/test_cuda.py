"""Gradient logs and replicas of training on a GPU; what they promise is tested everywhere, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from dsq_ckpt.lowdiff import Replica
from tests.lowdiff.loops import Case, Loop, check_every_step, differences, perceptron, recorded, seeded
from tests.lowdiff.workers.replica import known_holders, restored, until

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.usefixtures("one_thread"),
]
STEPS = 6
holders = pytest.fixture(known_holders)


def on_gpu(seed: int) -> nn.Module:
    return perceptron(seed).cuda()


def wide(seed: int) -> nn.Module:
    """Gradients of megabytes, which are on their way while the next step runs."""
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 2048), nn.Tanh(), nn.Linear(2048, 12))).cuda().bfloat16()


CASES = {
    "Adam": Case(lambda m: Adam(m.parameters(), 0.01), on_gpu),
    "AdamW, fused": Case(lambda m: AdamW(m.parameters(), 0.01, fused=True), on_gpu),
    "AdamW, capturable": Case(lambda m: AdamW(m.parameters(), 0.01, capturable=True), on_gpu),
    "bf16": Case(lambda m: AdamW(m.parameters(), 0.01, foreach=True), wide),
    "top-k": Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9), on_gpu, log={"compressor": "topk:0.05"}),
    "top-k, bf16": Case(lambda m: Adam(m.parameters(), 0.01), wide, log={"compressor": "topk:0.01"}),
    "clipped": Case(lambda m: Adam(m.parameters(), 0.01), on_gpu, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "accumulated": Case(lambda m: Adam(m.parameters(), 0.01), on_gpu, accumulate=3),
}


@pytest.mark.parametrize("in_a_thread", [False, True], ids=["process", "thread"])
@pytest.mark.parametrize("name", CASES)
def test_a_log_gives_every_step_bit_for_bit(tmp_path, name, in_a_thread, request):
    if in_a_thread:
        request.getfixturevalue("in_thread")
    table = recorded(CASES[name], tmp_path, STEPS)
    check_every_step(CASES[name], tmp_path, table)


def test_recovered_state_goes_on_as_training_did(tmp_path):
    case = CASES["AdamW, fused"]
    table = recorded(case, tmp_path, STEPS)
    loop = Loop(case, seed=3)
    assert loop.recover(tmp_path).step == STEPS
    ahead = Loop(case)
    ahead.model.load_state_dict(table[-1]["model"])
    ahead.optimizer.load_state_dict(table[-1]["optimizer"])
    for number in range(STEPS, STEPS + 3):
        assert loop.step(number) == ahead.step(number)
    assert differences(loop.state(), ahead.state()) == []


@pytest.mark.parametrize("model", [on_gpu, wide], ids=["fp32", "bf16"])
def test_a_replica_follows_up_to_rounding(tmp_path, holders, model):
    case = Case(lambda m: AdamW(m.parameters(), 0.01), model)
    loop = Loop(case)
    with Replica(tmp_path, loop.model, loop.optimizer) as replica:
        for number in range(STEPS):
            loop.step(number)
            replica.step()
            until(lambda: holders[-1].applied == replica.steps_done, f"step {replica.steps_done}")
            restored_loop = restored(case, tmp_path, holders[-1])
            for name, value in loop.model.state_dict().items():
                torch.testing.assert_close(restored_loop.model.state_dict()[name], value, rtol=1e-2, atol=2e-4)
