"""The collective step of a save: sketch, sum over ranks, choose the configuration, quantize."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import torch

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.core.checksums import checksums, quote
from dsq_ckpt.core.interrupts import defer_handler_errors
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.ancestry import with_sound_parent
from dsq_ckpt.engine.chain import Parent
from dsq_ckpt.engine.chunks import ChunkLoader, QuantizedChunk, quantized_lazily, small_on_host
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.kinship import is_related, note_exact, watch_for
from dsq_ckpt.engine.local import LocalItems, SaveItem
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.reporting import Doubts, report
from dsq_ckpt.errors import DSQError, SaveFailed
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey
from dsq_ckpt.quantization.exact_values import are_zero, need_exact_storage
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch, take_evenly
from dsq_ckpt.quantization.global_sketch import Loaded, build_global_sketch
from dsq_ckpt.quantization.groups import in_tree
from dsq_ckpt.quantization.layout import MEASURED, Layout
from dsq_ckpt.quantization.lost_rows import are_rows_needed, has_lost_rows, may_have_lost_rows
from dsq_ckpt.quantization.nan_check import contain_nan
from dsq_ckpt.quantization.plan import QuantizationPlan, all_exact, as_configured
from dsq_ckpt.quantization.restored_values import refine_restored_groups
from dsq_ckpt.quantization.scales import Gauge, gauges_of, mean_squares
from dsq_ckpt.quantization.untrained_weights import find_stateless_weights, group_tied_names
from dsq_ckpt.quantization.weight_averages import find_averages
from dsq_ckpt.storage.paths import expand_path


@dataclass
class QuantizedState:
    """The state of one rank, ready to be written.

    Attributes:
        chunks: chunks that are quantized as they are asked for, one by one, so that only their codes stay in memory.
        unquantized: items that are stored exactly, or rounded to bf16.
        plan: how all ranks store theirs.
        items: all items that are stored themselves, by chunk.
        tied: chunks that are stored as another one, and which that is.
        objects: names and bytes of its objects; iterated once.
        staged: whether the next save was given what it needs of the chunks when they were staged.
        alone: whether it may need no file of a parent: there is none, or it was found damaged.
        related: whether any weights of this rank depend on the checkpoint before; None: that cannot be told.
        watch: what was seen of the training, for the next save.
    """

    chunks: Iterator[QuantizedChunk]
    unquantized: list[SaveItem]
    plan: QuantizationPlan
    items: Mapping[ChunkKey, SaveItem]
    tied: Mapping[ChunkKey, ChunkKey] = field(default_factory=dict)
    objects: Iterable[tuple[str, bytes]] = ()
    staged: bool = False
    alone: bool = False
    related: bool | None = None
    watch: ChangeWatch = field(default_factory=ChangeWatch)


def quantize(
    options: SaveOptions, context: SaveContext, local: LocalItems, comm: Communicator, workers: Workers
) -> QuantizedState:
    """Sum the sketches of all ranks, choose, then quantize lazily, chunk by chunk; collective.

    Args:
        options: options of the save; the policy is not asked if the context says that everything is exact.
        context: context of the save.
        local: chunks of this rank.
        comm: communicator of the ranks that save.
        workers: threads.

    Raises:
        SaveFailed: on all ranks, when any rank failed, or the state changed while the policy evaluated it.
        NonFiniteTensor: there is NaN or Inf, and the configuration asks for an error.
    """
    local = local.as_agreed(context.layout)
    context = with_sound_parent(context, comm, workers, options.history)
    policy = all_exact if context.exact else options.policy
    if context.parent is None and context.previous is not None:
        options.history.release_device_codes(expand_path(context.previous.path))
    gradients = {
        item.key: found for item in (*local.items, *local.replicas)
        if item.kind == "weights" and (found := _gradient(item.key, local.gradients)) is not None
    }
    searches = policy not in (as_configured, all_exact)
    if context.previous is None:
        options.history.said.clear()
    if context.parent is None:
        for name in context.layout.shapes:
            options.history.told.pop(name, None)
    sketching = _Sketching(options, context, local, gradients, searches, workers)
    replicas: list[Chunk] = []
    before: dict[ChunkKey, Hashable] = {}
    try:
        with sketching, no_autocast():
            sketches = build_global_sketch(
                sketching.load, context.layout, context.model, options.config.quantize.outlier_octaves, comm, workers,
            )
            sketches = replace(sketches, chunks=sketching.with_all_rows(sketches.chunks, sketches.octaves))
            if searches:  # a failure must reach the ranks that go on to evaluate
                replicas = run_on_all_ranks(comm, lambda: sketching.replicas(sketches))
                before = run_on_all_ranks(comm, lambda: _state(local, workers))
    except DSQError:
        if context.parent is not None and (known := options.history.find(context.parent.save_id)) is not None:
            known.suspect = True
        raise
    weights = [chunk for chunk in sketches.chunks if chunk.group.startswith("weights/")]
    with defer_handler_errors():  # a search puts trial weights into the model, and takes them out again
        plan = policy(sketches, [*weights, *replicas], options.config, comm, workers)
    sketching.watch.restores.begin_save(sketches.loads, context.parent is None)
    fitted = refine_restored_groups(sketches.chunks, plan.analysis.fitted, sketching.watch.restores, comm, workers)
    plan = replace(plan, analysis=replace(plan.analysis, fitted=fitted))
    worst = sketches.worst(plan.analysis, {key.fqn for key in plan.compensations})
    plan = replace(plan, analysis=replace(plan.analysis, worst=worst))
    if searches:
        run_on_all_ranks(comm, lambda: _check_unchanged(before, _state(local, workers)))
    if sketches.undefined:
        undefined = sketches.nonfinite.union(*gather_from_all_ranks(comm, lambda: sketching.undefined))
        plan = replace(plan, analysis=replace(plan.analysis, nonfinite=undefined))
    told = options.history.told
    rounded = {name: beside for name, beside in sketches.layout.rounded.items() if name not in told}
    fitted_to = sketches.layout.fitted_to - told.keys()
    doubts = Doubts(None if context.parent is None else context.appeared, rounded, fitted_to, sketching.lost_rows)
    report(local, sketches, plan, options, doubts, comm)
    told.update(dict.fromkeys([*rounded, *fitted_to], False))
    if doubts.are_gathered(sketches):
        told.update(sketching.lost_rows)
    written = {chunk.key for chunk in sketches.chunks if chunk.group in plan.analysis.fitted}
    exact = [item for item in local.items if item.key not in written]
    if context.exact:
        exact = [replace(item, config=None) for item in exact]  # not as bf16 either
    note_exact(sketching.watch, sketching.weights, written)
    return QuantizedState(
        quantized_lazily(sketches, sketching.loader, plan), exact, plan, {item.key: item for item in local.items},
        local.tied, local.objects, alone=context.parent is None, related=sketching.related, watch=sketching.watch,
    )


class _Sketching:
    """The local part of the sketch, with the parent checkpoint open; use as a context manager.

    Attributes:
        undefined: names of tensors that are not quantized and hold NaN, once `load` was called.
        lost_rows: names of weights with rows that one step for all loses, and whether they are stored exactly for that,
            once `load` was called; without those that the user was told of since the last keyframe.
        weights: their chunks that may be lossy and trained, once `load` was called.
        related, watch: as in `QuantizedState`, once `load` was called.
    """

    def __init__(
        self, options: SaveOptions, context: SaveContext, local: LocalItems,
        gradients: Mapping[ChunkKey, torch.Tensor], searches: bool, workers: Workers,
    ) -> None:
        self._options, self._context, self._local, self._workers = options, context, local, workers
        self._gradients, self._searches = gradients, searches
        self._parent: Parent | None = None
        self.loader = self._loader()
        self.undefined: set[str] = set()
        self.lost_rows: dict[str, bool] = {}
        self._asked: set[ChunkKey] = set()
        self._tensors: dict[ChunkKey, torch.Tensor] = {}
        self.weights: dict[ChunkKey, torch.Tensor] = {}
        self.related: bool | None = None
        self.watch = ChangeWatch()

    def __enter__(self) -> _Sketching:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parent is not None:
            self._parent.close()

    def load(self) -> Loaded:
        """Return the chunks of this rank; called inside the collective."""
        context, items, history = self._context, self._local.items, self._options.history
        lossy = [item for item in items if item.quantized]
        others = [item for item in items if not item.quantized]
        nan = contain_nan(item.load() for item in others)
        self.undefined = {item.key.fqn for item, one in zip(others, nan, strict=True) if one}
        if lossy:
            warmup.wait("save")
        if context.parent is not None and context.model is not None:
            self._parent = Parent(context.parent, context.model, self._workers, history, context.shared)
            self.loader = self._loader()
        wanted, chunks = [*lossy, *_measured(items, context.layout)], []
        for item in wanted if self._searches else small_on_host(wanted):  # trials write to the tensors of the state
            if not item.quantized:
                chunks.append(Chunk(item.key, item.load(), MEASURED, 0, on_device=item.on_device))
            elif (chunk := self.loader.load(item)) is not None:
                chunks.append(chunk)
        self._tensors = {chunk.key: chunk.tensor for chunk in chunks}
        self.weights = {  # of this training: what no optimizer trains, such as a replay buffer, may be others each time
            chunk.key: chunk.tensor for chunk in chunks
            if chunk.group.startswith("weights/") and self._doubtful.get(chunk.key.fqn) is not False
        }
        self.related = is_related(self.weights, history, context)
        self.watch, loads = watch_for(self.related, history, context)
        self._asked = self._may_be_exact(wanted)
        weights = [chunk for chunk in chunks if chunk.key in self._asked]
        unlike = need_exact_storage([chunk.tensor for chunk in weights])
        left_out = {chunk.key for chunk, one in zip(weights, unlike, strict=True) if one} | self._untrained(weights)
        chunks = self.with_all_rows([chunk for chunk in chunks if chunk.key not in left_out])
        return Loaded(chunks, len(self.undefined), len(self.lost_rows), *loads)

    def _may_be_exact(self, items: Sequence[SaveItem]) -> set[ChunkKey]:
        """Return the weights that are stored exactly if what they hold asks for it.

        In a search none of the model is: all are tried, the metric judges them, and buffers are exact anyway.
        """
        model = self._options.frozen.unchanged
        if self._searches and not model:
            return set()
        return {
            item.key for item in items if item.kind == "weights" and item.quantized and not item.by_rule
            and not (self._searches and in_tree(item.key.fqn, model) is not None)
        }

    def _untrained(self, weights: Sequence[Chunk]) -> set[ChunkKey]:
        """Return the chunks of weights that stay as they are and have no state of an optimizer, or zeros alone.

        Each is taken to stay until it was seen to change. Those of a model that is known, which these optimizers surely
        do not train, are lossy only near weights that are trained, as averages of them; of other tensors the user is
        told.
        """
        options, layout = self._options, self._context.layout
        if options.config.quantize.frozen != "exact":
            return set()
        doubtful = self._doubtful
        if not self._may_learn():
            doubtful = {name: may_be for name, may_be in doubtful.items() if not may_be}
        idle = self._without_steps([chunk for chunk in weights if chunk.key.fqn not in doubtful])
        others = [
            chunk for chunk in weights if (chunk.key.fqn in doubtful or chunk.key in idle)
            and not in_tree(chunk.key.fqn, options.frozen.changing)
        ]
        if others:
            left, lossy = {chunk.key for chunk in others}, layout.weights()
            trained = take_evenly([item for item in self._local.items if item.key not in left])
            beside = [one for key, one in self._tensors.items() if key.fqn in lossy and key not in left]
            seen = ((chunk.key, chunk.tensor) for chunk in others)
            self.watch.update((item.load() for item in trained), seen, lambda changed: find_averages(changed, beside))
        return {
            chunk.key for chunk in others if self.watch.is_unchanged(chunk.key, changes=1)
            or (self._is_sure(chunk.key.fqn, doubtful) and not self.watch.is_average(chunk.key, changes=1))
        }

    def _is_sure(self, name: str, doubtful: Mapping[str, bool]) -> bool:
        """Return whether a tensor is of the model, and needs no gradient or is not a parameter of the optimizers."""
        known = in_tree(name, self._options.frozen.unchanged) is not None
        return known and False in (doubtful.get(name), in_tree(name, self._options.frozen.changing))

    def _may_learn(self) -> bool:
        """Return whether later saves can tell what changes, or may be able to.

        None follows a checkpoint made of a file; and saves of one state in several directories know nothing of each
        other, or are of several trainings.
        """
        context, options = self._context, self._options
        if context.previous is not None:
            return True
        others = (one.shapes == context.layout.shapes for one in options.history.checkpoints())
        return options.parent is not None and not any(others)

    def _without_steps(self, weights: Sequence[Chunk]) -> set[ChunkKey]:
        """Return the chunks whose squared gradients are zero throughout, where others here have some."""
        known = {
            chunk.key: self._tensors[key] for chunk in weights if (gauge := self._gauges.get(chunk.key.fqn)) is not None
            and (key := chunk.key._replace(fqn=gauge.name)) in self._tensors
        }
        zero = set(compress(known, are_zero(list(known.values()))))
        return zero if len(zero) < len(known) else set()

    def with_all_rows(self, chunks: list[Chunk], octaves: Mapping[str, Counts] | None = None) -> list[Chunk]:
        """Return the chunks without those of weights that would lose rows that training needs: these are exact.

        Args:
            chunks: chunks of this rank.
            octaves: counts by octave of whole tensors, once they are known: for shards that are small as a whole, which
                no other row here tells.
        """
        layout, whole = self._context.layout, dict[str, float]()
        if layout.residual:  # whose errors are those of differences
            return chunks
        weights = [chunk for chunk in chunks if chunk.group.startswith("weights/")]
        if octaves is not None:
            weights = [chunk for chunk in weights if chunk.key.shape != layout.shapes.get(chunk.key.fqn)]
            names = {chunk.key.fqn for chunk in weights} & octaves.keys()
            whole = mean_squares({name: octaves[name] for name in names}, sorted(names))
        doubtful, left_out = list[Chunk](), set[ChunkKey]()
        with suppress(torch.OutOfMemoryError):  # of a device: no save fails for want of a warning
            sizes = [whole.get(chunk.key.fqn) for chunk in weights]
            doubtful = list(compress(weights, may_have_lost_rows([chunk.tensor for chunk in weights], sizes)))
        for chunk in doubtful:
            name = chunk.key.fqn
            needed: bool | None = False
            with suppress(torch.OutOfMemoryError):
                if not has_lost_rows(chunk.tensor, whole.get(name)):
                    continue
                squares = self._squares(chunk, self._gauges.get(name))
                needed = None if squares is None else are_rows_needed(chunk.tensor, squares, whole.get(name))
            if needed and chunk.key in self._asked:
                left_out.add(chunk.key)
            if needed is not False and self._options.history.told.get(name) is not (chunk.key in left_out):
                self.lost_rows[name] = chunk.key in left_out
        return [chunk for chunk in chunks if chunk.key not in left_out]

    @cached_property
    def _doubtful(self) -> Mapping[str, bool]:
        """The weights that the state of optimizers does not name, and whether they may be trained all the same."""
        layout = self._context.layout
        tied = group_tied_names((other.fqn, stored.fqn) for other, stored in self._local.tied.items())
        types, own = self._options.layer_types, layout.of_models
        return find_stateless_weights(layout.weights(), layout.shapes, tied, types, own)

    @cached_property
    def _gauges(self) -> dict[str, Gauge]:
        return gauges_of(self._context.layout)

    def _squares(self, chunk: Chunk, gauge: Gauge | None) -> torch.Tensor | None:
        """Return the squared gradients of a chunk of weights, as far as the state of the save tells them."""
        gradient = self._gradients.get(chunk.key)
        if gauge is not None and gradient is None:
            gradient = self._tensors.get(chunk.key._replace(fqn=gauge.name))
        if gauge is None or gradient is None:
            return None
        squares = gradient.detach() if gauge.power == 1 else gradient.detach().float().square()
        return squares.to(chunk.tensor.device)

    def replicas(self, sketches: GlobalSketch) -> list[Chunk]:
        """Return the chunks of weights that another rank writes, scaled as that rank scales them."""
        scales, loader = sketches.scales, self._loader()
        return [
            chunk.scaled(scales.exponents.get(chunk.key.fqn, 0.0), keep_parent=chunk.group not in scales.refit)
            for item in self._local.replicas
            if item.quantized and item.kind == "weights" and item.key.fqn not in sketches.nonfinite
            for chunk in [loader.load(item)]
            if chunk is not None
        ]

    def _loader(self) -> ChunkLoader:
        return ChunkLoader(self._parent, self._gradients, self._context.layout.residual, self._workers)


def _measured(items: Sequence[SaveItem], layout: Layout) -> list[SaveItem]:
    """Return optimizer state that is not quantized itself, but from which the size of gradients is known."""
    wanted = any(config.codebook.gradient_power > 0 for config in layout.groups.values())
    return [item for item in items if wanted and item.key.fqn in layout.state and item.key.fqn not in layout.tensors]


def _state(local: LocalItems, workers: Workers) -> dict[ChunkKey, Hashable]:
    return checksums({item.key: item.load for item in (*local.items, *local.replicas)}, workers)


def _check_unchanged(before: Mapping[ChunkKey, Hashable], after: Mapping[ChunkKey, Hashable]) -> None:
    """Check that the state is still the one that was sketched.

    Raises:
        SaveFailed: `evaluate` or `check` changed it.
    """
    changed = sorted({key.fqn for key, found in before.items() if after[key] != found})
    if changed:
        raise SaveFailed(
            f"`evaluate` or `check` changed {quote(changed)}: they must leave model and optimizer as they are. The "
            "checkpoint was not written, and what changed was not put back: load an earlier checkpoint before training "
            "goes on"
        )


def _gradient(key: ChunkKey, gradients: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    if key in gradients:
        return gradients[key]
    name = strip_wrappers(key.fqn)
    while name and name not in gradients:
        name = name.partition(".")[2]
    found = gradients.get(name)
    return found if found is not None and found.numel() == key.elements else None
