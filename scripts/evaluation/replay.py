"""A recorded run compressed again: each of its checkpoints saved as a training loop would have, read back, evaluated.

What a base layer costs is measured on what was read back from the files, not taken from the search that chose it.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dsq_ckpt
from dsq_ckpt.api.compressor import fractions_of
from dsq_ckpt.api.saving import save_with_writer
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.quantization.groups import assign, layer_types
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import ConfigPolicy, plan_as_configured
from dsq_ckpt.search.folds import compute_degradation
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerReader
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.record_fields import parse_dtype
from evaluation.recording import Checkpoint as RecordedCheckpoint
from evaluation.recording import load_recording
from evaluation.workloads import Workload, create

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum")
"""Kinds of tensors are what the default configuration makes of them, whatever another one does: figures of systems
compare only if they are about the same tensors."""


@dataclass
class Bytes:
    """Of some tensors: uncompressed, in the base file, in the refinement file."""

    logical: int = 0
    base: int = 0
    refinement: int = 0

    def add(self, other: Bytes) -> None:
        """Add what other tensors take."""
        self.logical += other.logical
        self.base += other.base
        self.refinement += other.refinement


@dataclass
class CodeBits:
    """Of the weights that were quantized: elements, bits of their codes in the file, and what entropy says of them.

    Attributes:
        elements: quantized.
        stored: bits in the file, protected values included.
        codes: bits of the codes alone.
        entropy: conditional entropy of the codes as they were counted before coding, bits in all.
    """

    elements: int = 0
    stored: int = 0
    codes: int = 0
    entropy: float = 0.0


@dataclass
class Replayed:
    """One checkpoint of a replay.

    Attributes:
        step: of the recorded run.
        keyframe: it needs no other checkpoint.
        kinds: bytes by kind of tensor.
        files: bytes of base file, index and manifest.
        codes: how well the weights' codes were coded.
        lattice: by group of weights, the step in its units; the parent's, where that was about what was chosen.
        config: what was chosen.
        quality: the search's own record; None where nothing was searched.
        seconds_save: of the whole save, search included.
        seconds_load: of a load of everything that is kept.
        loss: of the model as it was.
        base_loss: with weights from the base layer.
        refined_loss: with weights from everything that is kept.
    """

    step: int
    keyframe: bool
    kinds: dict[str, Bytes]
    files: int
    codes: CodeBits
    lattice: dict[str, float]
    config: dict[str, Any]
    quality: dict[str, Any] | None
    seconds_save: float
    loss: float
    seconds_load: float = math.nan
    base_loss: float = math.nan
    refined_loss: float = math.nan

    @property
    def seconds_search(self) -> float:
        """Seconds that the search took of the save."""
        return float((self.quality or {}).get("seconds", 0.0))

    @property
    def evaluations(self) -> int:
        """How often the search evaluated the model."""
        return int((self.quality or {}).get("evaluations", 0))

    def ratio(self, kinds: Collection[str] = ("weights",)) -> float:
        """Return the compression ratio of the base layer of these tensors."""
        return _ratio([self.kinds[kind] for kind in kinds if kind in self.kinds])


Visit = Callable[[Workload, Replayed, Path, bool], None]
"""Called with the run into which a checkpoint was loaded, its figures, its path, and whether with its refinement."""


@dataclass
class Replay:
    """A recorded run under one configuration."""

    config: dsq_ckpt.DSQConfig
    checkpoints: list[Replayed] = field(default_factory=list)
    elements: int = 0
    """Of the state: weights and the optimizer's tensors."""
    warnings: list[str] = field(default_factory=list)

    def ratio(self, kinds: Collection[str] = ("weights",), deltas_only: bool = False) -> float:
        """Return the compression ratio of the base layers of these tensors over the run; NaN if it has none of them."""
        chosen = [point for point in self.checkpoints if not (deltas_only and point.keyframe)]
        return _ratio([point.kinds[kind] for point in chosen for kind in kinds if kind in point.kinds])

    @property
    def ratio_files(self) -> float:
        """The same of everything, with all that a file system sees but refinements."""
        logical = sum(part.logical for point in self.checkpoints for part in point.kinds.values())
        return logical / max(sum(point.files for point in self.checkpoints), 1)

    @property
    def measured(self) -> list[Replayed]:
        """Checkpoints whose degradation counts: those after step 0."""
        return [point for point in self.checkpoints if point.step > 0]

    def degradations(self) -> list[float]:
        """Return the relative increases of the loss with weights from base layers, after step 0."""
        return [compute_degradation(point.base_loss, point.loss, self.config.search) for point in self.measured]

    def refined_degradations(self) -> list[float]:
        """Return the relative increases of the loss with weights from all layers that are kept, after step 0."""
        return [compute_degradation(point.refined_loss, point.loss, self.config.search) for point in self.measured]


def replay(
    directory: Path, config: dsq_ckpt.DSQConfig, *, choices: Mapping[int, dsq_ckpt.DSQConfig] | None = None,
    steps: Collection[int] | None = None, report: Callable[[str], None] = lambda line: None,
    parts: Collection[str] = ("model", "optimizer"), visit: Visit | None = None,
) -> Replay:
    """Save every recorded checkpoint after step 0 as training would have, then load and evaluate each of them.

    A system that codes differences of values is given the state at step 0 first: something to differ from.

    Args:
        directory: of a complete recording.
        config: what a search starts from.
        choices: configurations by step, taken as they are in place of a search.
        steps: of the checkpoints to take; None for all.
        report: called with a line about every checkpoint.
        parts: of the run's state, what is saved.
        visit: called after each load; the run may be trained on then.
    """
    recording = load_recording(directory)
    settings = recording.info["settings"]
    run = create(settings["workload"], settings["seed"])
    manager = ConfigManager(run.model, run.evaluate)
    result = Replay(config, elements=sum(t.numel() for t in _tensors(run.state())))
    history = dsq_ckpt.SaveHistory()
    with tempfile.TemporaryDirectory(prefix="dsq-replay-") as name, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for checkpoint in recording.checkpoints:
            step = checkpoint["step"]
            wanted = config.delta.against == "values" if step == 0 else steps is None or step in steps
            if not wanted:
                continue
            chooser: ConfigPolicy = manager if choices is None else plan_as_configured
            if step == 0:
                chooser = plan_as_configured
            chosen = config if choices is None else choices.get(step, config)
            fractions = fractions_of(config)
            path = Path(name) / f"{step:06d}"
            point = save_recorded(run, checkpoint, path, chosen, chooser, fractions, parts, history)
            result.checkpoints.append(point)
            report(_line(point))
        for point in result.checkpoints:
            _evaluate(run, Path(name) / f"{point.step:06d}", point, parts, visit, history)
        result.warnings = sorted({str(warning.message) for warning in caught})
    return result


def save_recorded(
    run: Workload, checkpoint: RecordedCheckpoint, path: Path, config: dsq_ckpt.DSQConfig, chooser: ConfigPolicy,
    fractions: Fractions, parts: Collection[str] = ("model", "optimizer"),
    history: dsq_ckpt.SaveHistory | None = None,
) -> Replayed:
    """Restore the run at a recorded checkpoint, save it, and return what the save cost.

    Args:
        run: the workload; its state is replaced.
        checkpoint: of its recording.
        path: where to.
        config: of the save.
        chooser: policy of `CompressorInputs`.
        fractions: as for `CompressorInputs`.
        parts: of the run's state, what is saved.
        history: as for `DSQStorageWriter`.
    """
    run.restore({"model": checkpoint["model"], "optimizer": checkpoint["optimizer"]})
    state = {part: value for part, value in run.state().items() if part in parts}
    started = time.perf_counter()
    # Pinned: the second pass evaluates every refinement layer, which the next save would drop.
    writer = DSQStorageWriter(
        path, config, model=run.model, pinned=True, history=history,
        inputs=CompressorInputs(chooser, checkpoint["gradient"], fractions),
    )
    save_with_writer(lambda: (writer, state), staged=True)
    seconds = time.perf_counter() - started
    manifest = Manifest.read(path)
    kinds, codes = stored(path, layer_types(run.model))
    return Replayed(
        step=checkpoint["step"], keyframe=manifest.depth == 0, kinds=kinds,
        files=manifest.sum_bytes("own", "index") + (path / "manifest.json").stat().st_size, codes=codes,
        lattice={name: group.step for name, group in manifest.groups.items() if name[:8] == "weights/" and group.step},
        config=manifest.config, quality=manifest.quality, seconds_save=seconds, loss=checkpoint["loss"],
    )


def stored(path: Path, types: Mapping[str, str]) -> tuple[dict[str, Bytes], CodeBits]:
    """Return the bytes of a checkpoint, saved by one rank, by kind of tensor, from the contents of its files.

    The manifest's own sums by kind do not do: tensors that one configuration quantizes are exact in another.

    Args:
        path: the checkpoint.
        types: layer type of every parameter.
    """
    kinds: dict[str, Bytes] = {}
    codes = CodeBits()
    usual = dsq_ckpt.DSQConfig().quantize
    with Checkpoint(path) as checkpoint:
        manifest, shapes = checkpoint.manifest, {f: t["shape"] for f, t in checkpoint.index["tensors"].items()}
    contents = {file.name: _contents(path / file.name) for file in manifest.files if file.role in ("own", "refinement")}
    for file in manifest.files:
        if file.role != "own":
            continue
        own = contents[file.name]
        refined = contents.get(f"{Path(file.name).stem}.refinement", {"records": {}})["records"]
        for number, record in enumerate(own["records"]):
            fqn = record["fqn"]
            kind = "exact"
            if record["type"] != "bytes":
                kind = assign(fqn, shapes[fqn], parse_dtype(record["dtype"]), usual, types).kind
            part = _record_bytes(record, own, refined.get(str(number)))
            kinds.setdefault(kind, Bytes()).add(part)
            if kind == "weights" and record["type"] == "coded":
                codes.elements += math.prod(record["shape"])
                codes.stored += 8 * part.base
                codes.codes += 8 * sum(block[1] for block in record["blocks"] if block is not None)
    codes.entropy = sum(
        group.bits_per_element * group.elements for name, group in manifest.groups.items()
        if name.startswith("weights/")
    )
    return kinds, codes


def _record_bytes(record: Mapping[str, Any], own: Mapping[str, Any], refined: Mapping[str, Any] | None) -> Bytes:
    """Return the bytes of one record of a file; of a block that tensors share, its part."""
    if record["type"] == "coded":
        elements = math.prod(record["shape"])
        blocks = [*record["blocks"], *([record["protected"]] if "protected" in record else [])]
        beside = [] if refined is None else [*refined["blocks"], *filter(None, [refined.get("protected")])]
        scales = 0
        if "scales" in record:
            pack, count = own["scales"]
            scales = -(-own["packs"][pack][0][1] * sum(record["scales"][1:]) // count)
        return Bytes(
            elements * parse_dtype(record["dtype"]).itemsize,
            sum(block[1] for block in blocks if block is not None) + scales, sum(block[1] for block in beside),
        )
    size = record["size"]
    logical = size
    if record["type"] == "plain":
        logical = math.prod(record["shape"]) * parse_dtype(record["dtype"]).itemsize
    held = [own["packs"][place] for place in record["packs"]]
    if "at" in record:
        [(block, _, whole, *_)] = held
        return Bytes(logical, -(-block[1] * size // max(whole, 1)))
    return Bytes(logical, sum(block[1] for block, *_ in held))


def _contents(path: Path) -> dict[str, Any]:
    reader = ContainerReader(path)
    try:
        contents: dict[str, Any] = reader.contents
        return contents
    finally:
        reader.close()


def _evaluate(
    run: Workload, path: Path, point: Replayed, parts: Collection[str], visit: Visit | None,
    history: dsq_ckpt.SaveHistory,
) -> None:
    """Load a checkpoint into the run, its base layer alone and then all of it, and evaluate both."""
    state = {part: value for part, value in run.state().items() if part in parts}
    started = time.perf_counter()
    dsq_ckpt.load(state, path, refinement=False, history=history)
    base_seconds = time.perf_counter() - started
    point.seconds_load, point.base_loss = base_seconds, run.evaluate()
    if visit is not None:
        visit(run, point, path, False)
    if not any(part.refinement for part in point.kinds.values()):
        point.refined_loss = point.base_loss
        return
    started = time.perf_counter()
    dsq_ckpt.load(state, path, history=history)
    point.seconds_load = time.perf_counter() - started
    point.refined_loss = run.evaluate()
    if visit is not None:
        visit(run, point, path, True)


def _ratio(parts: list[Bytes]) -> float:
    base = sum(part.base for part in parts)
    return sum(part.logical for part in parts) / base if base else math.nan


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, Mapping):
        return [tensor for part in tree.values() for tensor in _tensors(part)]
    if isinstance(tree, list | tuple):
        return [tensor for part in tree for tensor in _tensors(part)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def _line(point: Replayed) -> str:
    quality = point.quality or {}
    chosen = quality.get("chosen")
    said = ", ".join(f"{key} {value}" for key, value in chosen.items()) if chosen else quality.get("reason", "as set")
    return (
        f"  step {point.step}: weights {point.ratio():.1f}x, {said}; "
        f"{point.evaluations} evaluations, {point.seconds_search:.1f} s of {point.seconds_save:.1f} s"
    )
