"""The same engine saved by us, exactly, and by DeepSpeed: `torch.load` gives the same. argv = a directory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import deepspeed
import torch
import torch.distributed as dist
from common import EXACT, LOSSY, begin, check, end, engine_of, settings, train
from torch import nn

import dsq_ckpt.deepspeed
from dsq_ckpt.storage.manifest import Manifest

SGD = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
MUON = {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9}}


class Odd(torch.optim.SGD):
    """An optimizer with state of a size that weights do not have."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", torch.ones(2 * parameter.numel()))
        super().step(closure)


class Tied(common.Model):
    """A head that is its embedding, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(33, 97, bias=False)
        self.head.weight = self.emb.weight
        self.unused = nn.Linear(13, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.head(self.emb(x))
        return nn.functional.cross_entropy((h + 0.1 * self.frozen(h)).float(), y)


KINDS: dict[str, tuple[dict[str, Any], type[nn.Module], dict[str, Any]]] = {
    "tied, stage 0": (settings(0), Tied, {}),
    "tied, stage 0, fp32": (settings(0, bf16=False), Tied, {}),
    "tied, stage 2": (settings(2), Tied, {}),
    "tied, stage 3": (settings(3), Tied, {}),
    "SGD, stage 0, fp32": ({**settings(0, bf16=False), "optimizer": SGD}, common.Model, {}),
    "SGD, stage 1": ({**settings(1), "optimizer": SGD, "zero_allow_untested_optimizer": True}, common.Model, {}),
    "Muon, stage 1": ({**settings(1), "optimizer": MUON}, common.Model, {}),
    "Muon, stage 2": ({**settings(2), "optimizer": MUON}, common.Model, {}),
    "fp32 accumulation, stage 1": ({**settings(1), "data_types": {"grad_accum_dtype": "fp32"}}, common.Model, {}),
    "elastic, stage 2": (settings(2, elastic_checkpoint=True), common.Model, {}),
    "without frozen ones, stage 2": (settings(2), common.Model, {"exclude_frozen_parameters": True}),
    "without frozen ones, stage 3": (settings(3), common.Model, {"exclude_frozen_parameters": True}),
}


def differences(ours: Any, plain: Any, where: str) -> Iterator[str]:
    """Where two unpickled objects are not the same; tensors to the last bit."""
    if isinstance(plain, torch.Tensor):
        alike = type(ours) is type(plain) and (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
        if not alike or not torch.equal(_bits(ours), _bits(plain)):
            yield where
    elif type(ours) is not type(plain):
        yield f"{where}: {type(ours)}, {type(plain)}"
    elif isinstance(plain, Mapping):
        if list(ours) != list(plain):
            yield f"{where}: {list(ours)}, {list(plain)}"
        for key in plain:
            yield from differences(ours[key], plain[key], f"{where}.{key}")
    elif isinstance(plain, list | tuple):
        if len(ours) != len(plain):
            yield where
        for place, (one, other) in enumerate(zip(ours, plain, strict=False)):
            yield from differences(one, other, f"{where}.{place}")
    elif hasattr(plain, "__dict__") and not callable(plain):
        yield from differences(vars(ours), vars(plain), where)
    elif ours != plain:
        yield f"{where}: {ours!r}, {plain!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def compare(run: Path, name: str, steps: int) -> None:
    tree, kind, options = KINDS[name]
    torch.manual_seed(0)
    model = kind()
    engine = dsq_ckpt.deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={**tree, "dsq_checkpoint": EXACT},
    )[0]
    train(engine, 0, steps)
    first = next(iter(engine.module.parameters())).detach()
    wave, real = torch.complex(torch.arange(9.0), torch.ones(9))[2:5], torch.arange(9.0)[1:6]
    client = {
        "numbers": torch.arange(5.0), "alias": first, "part": torch.arange(1000.0)[3:7], "step": steps,
        "wave": wave, "conjugate": wave.conj(), "real": real, "negated": torch._neg_view(real),
        "parameter": torch.nn.Parameter(torch.arange(1000.0)[3:7]),
    }
    dsq_engine = engine.checkpoint_engine
    engine.save_checkpoint(str(run / "ours"), tag="t", client_state=client, **options)
    engine.checkpoint_engine = dsq_engine.inner
    engine.save_checkpoint(str(run / "plain"), tag="t", client_state=client, **options)
    dist.barrier()
    files = sorted(file.name for file in (run / "plain" / "t").glob("*.pt"))
    problems = [] if files == sorted(file.name for file in (run / "ours" / "t").glob("*.pt")) else ["files"]
    for file in files:
        two = [torch.load(run / who / "t" / file, weights_only=False) for who in ("ours", "plain")]
        problems += differences(*two, file)
    check(problems == [], f"{name}, after {steps} steps: {problems[:3]}")


def lossy(run: Path, stage: int) -> None:
    """State of the user is exact, though its tensors may be the engine's, which are not."""
    engine = engine_of(settings(stage, bf16=stage > 0), LOSSY)
    train(engine, 0, 2)
    alias = engine.module.state_dict()
    original = {name: value.clone() for name, value in alias.items()}
    engine.save_checkpoint(str(run), client_state={"best": {"alias": alias}, "optimizer_state_dict": {"own": original}})
    again = engine_of(settings(stage, bf16=stage > 0), LOSSY, seed=1)
    _, client = again.load_checkpoint(str(run))
    given = (client["best"]["alias"], client["optimizer_state_dict"]["own"])
    check(all(torch.equal(value, entry[name]) for entry in given for name, value in original.items()), "client_state")
    own = again.module.state_dict()
    check(not torch.equal(own["l1.weight"], original["l1.weight"]), f"stage {stage}: the engine's own state is lossy")
    stored = sum(file.stat().st_size for file in (run / "global_step2").glob("*optim_states.pt"))
    check(stored < 100_000, f"stage {stage}: {stored} bytes of optimizer state are left to DeepSpeed")


def momentum(run: Path) -> None:
    """Momentum of Muon is compressed finely for each parameter that lies in one partition; others are told of."""
    engine = engine_of({**settings(1), "optimizer": MUON}, LOSSY)
    train(engine, 0, 2)
    said = told(engine, run / "muon")
    manifest = Manifest.read(run / "muon" / "1")
    check("momentum/linear/relative" in manifest.groups and said == [], f"Muon: {sorted(manifest.groups)}, {said}")
    again = engine_of({**settings(1), "optimizer": MUON}, LOSSY, seed=1)
    again.load_checkpoint(str(run / "muon"))
    two = [next(iter(owner.basic_optimizer.state.values()))["momentum_buffer"].float() for owner in (engine, again)]
    off = float((two[0] - two[1]).norm() / two[0].norm())
    # All that the second rank has of it is of a matrix that the first has a part of too.
    check(0 < off < 0.07 if dist.get_rank() == 0 else off == 0, f"momentum comes back, {off:.1%} off")
    tree = {**settings(1), "zero_allow_untested_optimizer": True}
    del tree["optimizer"]
    engine = engine_of(tree, LOSSY, optimizer=lambda groups: Odd(groups, lr=0.01, momentum=0.9))
    train(engine, 0, 2)
    said = told(engine, run / "odd")
    expected = "MiB of the optimizer's 'kept' is stored whole, in DeepSpeed's own files"
    check(len(said) == (dist.get_rank() == 0) and all(expected in text for text in said), f"told: {said}")


def told(engine: Any, run: Path) -> list[str]:
    """Return the warnings of two saves about state that is stored whole."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tag in "01":
            engine.save_checkpoint(str(run), tag=tag)
    return [str(warning.message) for warning in caught if "stored whole" in str(warning.message)]


def main() -> None:
    directory = begin()
    momentum(directory / "momentum")
    for stage in (0, 2):
        lossy(directory / f"lossy-{stage}", stage)
    for name in KINDS:
        for steps in (0, 2):
            compare(directory / name.replace(" ", "_") / str(steps), name, steps)
    end()


if __name__ == "__main__":
    deepspeed.logger.setLevel("ERROR")
    torch.compiler.set_stance("force_eager")  # functions of Muon, which take longer to compile than all else here
    main()
