"""Compress one checkpoint by itself, load it, and export it as a file of torch.save.

    python examples/one_shot.py --out compressed
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsq_ckpt


def new_model() -> nn.Module:
    """Return a model with random weights."""
    return nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))


def main() -> None:
    """Train a model, compress it twice, load and export it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a directory; what is there is replaced")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = new_model()
    tokens = torch.arange(128)
    targets = (tokens * 7 + 1) % 128
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> float:
        """Return the loss of `model` as it is now, on fixed batches."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(tokens), targets))

    # A file goes in as it is: torch.save, safetensors, a DCP directory.
    torch.save(model.state_dict(), out / "model.pt")
    result = dsq_ckpt.compress(out / "model.pt", out / "default", overwrite=True)
    print(f"default: {result['bytes_kept']} bytes of {(out / 'model.pt').stat().st_size}")

    # With a bound, the smallest configuration is searched that costs at most 1 % of the loss.
    result = dsq_ckpt.compress(model, out / "bounded", evaluate=evaluate, max_degradation=0.01, overwrite=True)
    print(f"bounded: {result['bytes_kept']} bytes, {100 * result['quality']['degradation']:+.2f} % of loss")

    loaded = new_model()
    dsq_ckpt.load(loaded, out / "default")
    with torch.no_grad():
        loss = nn.functional.cross_entropy(loaded(tokens), targets)
    print(f"loss {evaluate():.4f}, loaded {loss:.4f}")

    state: dict[str, Any] = {}
    dsq_ckpt.load(state, out / "default")  # an empty dict is filled with all there is
    torch.save(state, out / "exported.pt")  # `dsq export` does it without Python, also to safetensors
    print("exported", sorted(state))


if __name__ == "__main__":
    main()
