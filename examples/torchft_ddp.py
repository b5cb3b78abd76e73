"""Train two replicas with torchft. One is killed and starts again: the other sends its state, compressed bit for bit.

    python examples/torchft_ddp.py
"""

import multiprocessing
import os
import signal
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from dsq_ckpt.integrations.torchft import DSQTransport

STEPS, DIES_AT = 20, 10


def train(number: int, lighthouse: str, dies: bool, results: Any) -> None:
    """Train a replica of one process until the last step; another one that is ahead sends its state first."""
    torch.manual_seed(number)  # other weights, until the first step
    inner = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    plain = torch.optim.AdamW(inner.parameters(), lr=1e-3)

    def state_dict() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": plain.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])
        print(f"replica {number} got the state of step {manager.current_step()}", flush=True)

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=load_state_dict, state_dict=state_dict,
        min_replica_size=2, rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"replica_{number}",
        checkpoint_transport=DSQTransport(),  # the line
    )
    model, optimizer = DistributedDataParallel(manager, inner), Optimizer(manager, plain)
    tokens = torch.arange(128)[number::2]
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # agrees who takes part in the step
        nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128).backward()
        optimizer.step()
        if dies and manager.current_step() == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    results.put((number, sum(float(value.detach().double().sum()) for value in inner.parameters())))
    manager.shutdown()


def main() -> None:
    """Start both, and the one that dies again."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()

    def start(number: int, dies: bool) -> Any:
        process = processes.Process(target=train, args=(number, lighthouse.address(), dies, results), daemon=True)
        process.start()
        return process

    first, second = start(0, False), start(1, True)
    second.join()
    print(f"replica 1 ended with {second.exitcode}, and starts again", flush=True)
    again = start(1, False)
    sums = dict(results.get(timeout=600) for _ in range(2))
    for process in (first, again):
        process.join()
    print(f"step {STEPS}: {'the same weights' if sums[0] == sums[1] else f'other weights: {sums}'}")
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
