"""Log every step by its gradients, die without warning, and recover the last step bit for bit (LowDiff).

    python examples/gradient_log.py --out runs/logged --die-at 25    # ends at once after step 25, as by a power cut
    python examples/gradient_log.py --out runs/logged                # recovers step 25 and goes on to step 40
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import dsq_ckpt


def main() -> None:
    """Train, with every step in the log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="directory of snapshots and log")
    parser.add_argument("--steps", type=int, default=40, help="last step of the run")
    parser.add_argument("--die-at", type=int, help="step after which the process ends at once")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(128)

    # The newest snapshot and every complete logged step after it; None where there is nothing yet.
    recovered = dsq_ckpt.lowdiff.recover(arguments.out, model, optimizer)
    if recovered is not None:
        print(f"recovered step {recovered.step}: {recovered.replayed} steps replayed, checksum {checksum(model)}")
    log = dsq_ckpt.lowdiff.GradientLog(
        arguments.out, model, optimizer, compressor="topk:0.01", snapshot_every=20, resume=recovered
    )
    for step in range(log.steps_done + 1, arguments.steps + 1):
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step()  # the iteration is over; its gradients go to the process that writes
        if step == arguments.die_at:
            print(f"dies after step {step}, checksum {checksum(model)}", flush=True)
            os._exit(1)
    log.close()
    print(f"step {log.steps_done} loss {loss.item():.4f}")


def checksum(model: nn.Module) -> str:
    """Return the sum of all weights, to the last bit."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters())).hex()


if __name__ == "__main__":
    main()
