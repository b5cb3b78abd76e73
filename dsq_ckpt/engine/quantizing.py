"""The collective step of a save: sketch, sum over ranks, choose the configuration, quantize."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress

import torch

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import defer_handler_errors
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.chain import ParentCheckpoint
from dsq_ckpt.engine.chunks import ChunkLoader, QuantizedChunk, copy_small_to_host, quantize_lazily
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.local_state import LocalItems, SaveItem
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.parent_integrity import drop_damaged_parent
from dsq_ckpt.engine.related_weights import is_related, record_exact_samples, select_watch
from dsq_ckpt.engine.save_warnings import WarningCandidates, emit_save_warnings
from dsq_ckpt.errors import ConfigError, DSQError
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey
from dsq_ckpt.quantization.exact_values import are_zero, exceed_bf16, need_exact_storage
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch, take_evenly
from dsq_ckpt.quantization.global_sketch import LocalChunks, build_global_sketch
from dsq_ckpt.quantization.groups import find_by_suffix
from dsq_ckpt.quantization.layout import MEASURE_ONLY, Layout
from dsq_ckpt.quantization.lost_rows import are_rows_needed, has_lost_rows, may_have_lost_rows
from dsq_ckpt.quantization.nan_check import contain_nan
from dsq_ckpt.quantization.plan import QuantizationPlan, plan_as_configured, plan_exact
from dsq_ckpt.quantization.restored_values import refine_restored_groups
from dsq_ckpt.quantization.scales import Gauge, find_gauges, mean_squares
from dsq_ckpt.quantization.untrained_weights import find_stateless_weights, group_tied_names
from dsq_ckpt.quantization.weight_averages import find_averages
from dsq_ckpt.storage.paths import expand_path


@dataclass
class QuantizedState:
    """The state of one rank, ready to be written.

    Attributes:
        chunks: chunks that are quantized lazily, one by one, so that only their codes stay in memory.
        unquantized: items that are stored exactly, or rounded to bf16.
        plan: quantization plan of all ranks.
        items: items that are stored under their own name, by chunk.
        tied: the stored chunk, by chunk that shares its memory.
        objects: names and bytes of objects; iterated once.
        is_staged: whether the chunks were added to the history when they were staged.
        is_self_contained: whether it must not need files of a parent: there is none, or it is damaged.
        related: whether any weights of this rank depend on the previous checkpoint; None: unknown.
        watch: observations of the training, for the next save.
    """

    chunks: Iterator[QuantizedChunk]
    unquantized: list[SaveItem]
    plan: QuantizationPlan
    items: Mapping[ChunkKey, SaveItem]
    tied: Mapping[ChunkKey, ChunkKey] = field(default_factory=dict)
    objects: Iterable[tuple[str, bytes]] = ()
    is_staged: bool = False
    is_self_contained: bool = False
    related: bool | None = None
    watch: ChangeWatch = field(default_factory=ChangeWatch)


def quantize_state(
    options: SaveOptions, context: SaveContext, local: LocalItems, comm: Communicator, workers: Workers
) -> QuantizedState:
    """Sum the sketches of all ranks, choose the configuration, then quantize lazily by chunk; collective.

    Args:
        options: options of the save; the policy is not called if the context stores everything exactly.
        context: context of the save.
        local: chunks of this rank.
        comm: communicator of the ranks that save.
        workers: threads.

    Raises:
        SaveFailed: on all ranks, if any rank failed, or the state changed while the policy evaluated it.
        NonFiniteTensor: there is NaN or Inf, and the configuration asks for an error.
    """
    local = local.apply_layout(context.layout)
    context = drop_damaged_parent(context, comm, workers, options.history)
    policy = plan_exact if context.exact else options.policy
    if context.parent is None and context.previous is not None:
        options.history.release_device_codes(expand_path(context.previous.path))
    gradients = {
        item.key: gradient for item in (*local.items, *local.replicas)
        if item.kind == "weights" and (gradient := local.find_gradient(item.key)) is not None
    }
    searches = policy not in (plan_as_configured, plan_exact)
    if context.previous is None:
        options.history.warned_in_run.clear()
    if context.parent is None:
        for name in context.layout.shapes:
            options.history.warned_since_keyframe.pop(name, None)
    sketching = _LocalSketch(options, context, local, gradients, searches, workers)
    replicas: list[Chunk] = []
    before: dict[ChunkKey, Hashable] = {}
    try:
        with sketching, no_autocast():
            sketches = build_global_sketch(
                sketching.load, context.layout, context.model, options.config.quantize.outlier_octaves, comm, workers,
            )
            chunks = sketching.exclude_lost_rows(sketches.chunks, sketches.octaves)
            sketches = replace(sketches, chunks=chunks, restores=sketching.watch.restores)
            if searches:  # a failure must reach the ranks that go on to evaluate
                replicas = run_on_all_ranks(comm, lambda: sketching.load_replicas(sketches))
                before = run_on_all_ranks(comm, lambda: local.compute_checksums(workers))
    except DSQError:
        if context.parent is not None and (checkpoint := options.history.find(context.parent.save_id)) is not None:
            checkpoint.suspect = True
        raise
    sketches.restores.begin_save(sketches.loads, context.parent is None)
    weights = [chunk for chunk in sketches.chunks if chunk.group.startswith("weights/")]
    with defer_handler_errors():  # a search replaces weights of the model by trial weights, and restores them
        plan = policy(sketches, [*weights, *replicas], options.config, comm, workers)
    fitted = refine_restored_groups(sketches.chunks, plan.analysis.fitted, sketches.restores, comm, workers)
    plan = replace(plan, analysis=replace(plan.analysis, fitted=fitted))
    worst = sketches.find_worst_tensors(plan.analysis, {key.fqn for key in plan.compensations})
    plan = replace(plan, analysis=replace(plan.analysis, worst_tensors=worst))
    if searches:
        run_on_all_ranks(comm, lambda: local.check_unchanged(before, workers))
    if sketches.has_nan:
        nonfinite = sketches.nonfinite.union(*gather_from_all_ranks(comm, lambda: sketching.nan_tensors))
        plan = replace(plan, analysis=replace(plan.analysis, nonfinite=nonfinite))
    warned = options.history.warned_since_keyframe
    rounded = {name: causes for name, causes in sketches.layout.rounded_moments.items() if name not in warned}
    fitted_to = sketches.layout.weight_bound_state - warned.keys()
    new_weights = None if context.parent is None else context.new_weights
    candidates = WarningCandidates(new_weights, rounded, fitted_to, sketching.lost_rows)
    emit_save_warnings(local, sketches, plan, options, candidates, comm)
    warned.update(dict.fromkeys([*rounded, *fitted_to], False))
    if candidates.need_gather(sketches):
        warned.update(sketching.lost_rows)
    written = {chunk.key for chunk in sketches.chunks if chunk.group in plan.analysis.fitted}
    exact = [
        replace(item, config=None) if context.exact or item.key in sketching.excluded else item  # not as bf16 either
        for item in local.items if item.key not in written
    ]
    record_exact_samples(sketching.watch, sketching.weights, written)
    return QuantizedState(
        quantize_lazily(sketches, sketching.loader, plan), exact, plan, {item.key: item for item in local.items},
        local.tied, local.objects, is_self_contained=context.parent is None, related=sketching.related,
        watch=sketching.watch,
    )


class _LocalSketch:
    """The local part of the sketch, with the parent checkpoint open; a context manager. `load` sets the attributes.

    Attributes:
        nan_tensors: names of tensors that are not quantized and hold NaN.
        lost_rows: names of weights with rows that a single step per tensor loses, and whether they are stored exactly
            for that reason; without those that the user was warned of since the last keyframe.
        weights: chunks of weights that may be lossy and trained.
        excluded: weights that are stored exactly because of their values, or because they are not trained.
        related, watch: as in `QuantizedState`.
    """

    def __init__(
        self, options: SaveOptions, context: SaveContext, local: LocalItems,
        gradients: Mapping[ChunkKey, torch.Tensor], searches: bool, workers: Workers,
    ) -> None:
        self._options, self._context, self._local, self._workers = options, context, local, workers
        self._gradients, self._searches = gradients, searches
        self._parent: ParentCheckpoint | None = None
        self.loader = self._make_loader()
        self.nan_tensors: set[str] = set()
        self.lost_rows: dict[str, bool] = {}
        self.excluded: set[ChunkKey] = set()
        self._exact_candidates: set[ChunkKey] = set()
        self._tensors: dict[ChunkKey, torch.Tensor] = {}
        self.weights: dict[ChunkKey, torch.Tensor] = {}
        self.related: bool | None = None
        self.watch = ChangeWatch()

    def __enter__(self) -> _LocalSketch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parent is not None:
            self._parent.close()

    def load(self) -> LocalChunks:
        """Return the chunks of this rank; called within the collective."""
        context, items, history = self._context, self._local.items, self._options.history
        lossy = [item for item in items if item.quantized]
        others = [item for item in items if not item.quantized]
        nan = contain_nan(item.load() for item in others)
        self.nan_tensors = {item.key.fqn for item, has_nan in zip(others, nan, strict=True) if has_nan}
        if lossy:
            warmup.wait("save")
        parent, model = context.parent, context.model
        if parent is not None and model is not None:
            self._parent = ParentCheckpoint(parent, model, self._workers, history, context.reuses_parent)
            self.loader = self._make_loader()
        selected, chunks = [*lossy, *_select_gradient_measures(items, context.layout)], []
        for item in selected if self._searches else copy_small_to_host(selected):  # trials modify tensors of the state
            if not item.quantized:
                chunks.append(Chunk(item.key, item.load(), MEASURE_ONLY, 0, on_device=item.on_device))
            elif (chunk := self.loader.load(item)) is not None:
                chunks.append(chunk)
        self._tensors = {chunk.key: chunk.tensor for chunk in chunks}
        self.weights = {  # tensors without optimizer state, such as a replay buffer, say nothing about the training
            chunk.key: chunk.tensor for chunk in chunks
            if chunk.group.startswith("weights/") and self._weights_without_state.get(chunk.key.fqn) is not False
        }
        self.related = is_related(self.weights, history, context)
        self.watch, loads = select_watch(self.related, history, context)
        rounded = self._load_rounded()
        self._exact_candidates = self._find_exact_candidates(items)
        weights = [chunk for chunk in [*chunks, *rounded] if chunk.key in self._exact_candidates]
        unlike = need_exact_storage([chunk.tensor for chunk in weights])
        self.excluded = {chunk.key for chunk, is_exact in zip(weights, unlike, strict=True) if is_exact}
        self.excluded |= self._find_untrained(weights)
        out_of_range = exceed_bf16([chunk.tensor for chunk in rounded])
        self.excluded |= {chunk.key for chunk in compress(rounded, out_of_range)}
        chunks = self.exclude_lost_rows([chunk for chunk in chunks if chunk.key not in self.excluded])
        return LocalChunks(chunks, len(self.nan_tensors), len(self.lost_rows), *loads)

    def _load_rounded(self) -> list[Chunk]:
        """Return the chunks that are rounded to bf16 unless their values speak against it: weights, and float64.

        Raises:
            ConfigError: a search would not measure what the rounding costs.
        """
        items = [
            item for item in self._local.items
            if item.rounded_dtype is not None and (item.kind == "weights" or item.dtype == torch.float64)
        ]
        weights = sorted({item.key.fqn for item in items if item.kind == "weights"})
        if weights and self._searches:
            raise ConfigError(
                "`evaluate` does not measure what rounding to bf16 (method: bf16 in quantize.weights or "
                f"quantize.groups) costs in {quote(weights)}: choose method quantize, "
                "for which a search finds steps within the bound, or exact; or save without `evaluate`"
            )
        return [Chunk(item.key, item.load(), item.group, 0, on_device=item.on_device) for item in items]

    def _find_exact_candidates(self, items: Sequence[SaveItem]) -> set[ChunkKey]:
        """Return the weights that may be stored exactly because of their values.

        In a search none of the model is: the metric judges all of them, and buffers are exact anyway.
        """
        model = self._options.frozen.unchanged
        if self._searches and not model:
            return set()
        return {
            item.key for item in items if item.kind == "weights" and item.config is not None and not item.by_rule
            and not (self._searches and find_by_suffix(item.key.fqn, model) is not None)
        }

    def _find_untrained(self, weights: Sequence[Chunk]) -> set[ChunkKey]:
        """Return the chunks of weights that do not change and have no optimizer state, or only zeros in it.

        Each is taken as constant until a change was observed. Weights of a known model that these optimizers surely do
        not train are lossy only if they are close to trained weights, as averages of them are. The user is warned of
        other tensors.
        """
        options, layout = self._options, self._context.layout
        if options.config.quantize.frozen != "exact":
            return set()
        unclear = self._weights_without_state
        if not self._can_observe_changes():
            unclear = {name: may_be for name, may_be in unclear.items() if not may_be}
        idle = self._find_without_gradients([chunk for chunk in weights if chunk.key.fqn not in unclear])
        others = [
            chunk for chunk in weights if (chunk.key.fqn in unclear or chunk.key in idle)
            and not find_by_suffix(chunk.key.fqn, options.frozen.changing)
        ]
        if others:
            remaining, lossy = {chunk.key for chunk in others}, layout.weights()
            trained = take_evenly([item for item in self._local.items if item.key not in remaining])
            trained_weights = [
                tensor for key, tensor in self._tensors.items() if key.fqn in lossy and key not in remaining
            ]
            pairs = ((chunk.key, chunk.tensor) for chunk in others)
            self.watch.update(
                (item.load() for item in trained), pairs, lambda changed: find_averages(changed, trained_weights)
            )
        return {
            chunk.key for chunk in others if self.watch.is_unchanged(chunk.key, changes=1)
            or (self._is_surely_untrained(chunk.key.fqn, unclear) and not self.watch.is_average(chunk.key, changes=1))
        }

    def _is_surely_untrained(self, name: str, unclear: Mapping[str, bool]) -> bool:
        """Return whether a tensor is of the model, and needs no gradient or is not a parameter of the optimizers."""
        is_known = find_by_suffix(name, self._options.frozen.unchanged) is not None
        return is_known and False in (unclear.get(name), find_by_suffix(name, self._options.frozen.changing))

    def _can_observe_changes(self) -> bool:
        """Return whether later saves may observe which tensors change.

        They cannot after a conversion of a file, which no save follows, nor if one state is saved in several
        directories, where saves are not connected or belong to several trainings.
        """
        context, options = self._context, self._options
        if context.previous is not None:
            return True
        others = (checkpoint.shapes == context.layout.shapes for checkpoint in options.history.checkpoints())
        return options.parent is not None and not any(others)

    def _find_without_gradients(self, weights: Sequence[Chunk]) -> set[ChunkKey]:
        """Return the chunks whose squared gradients are all zero, if other chunks of this rank have nonzero ones."""
        names = {
            chunk.key: self._tensors[key] for chunk in weights if (gauge := self._gauges.get(chunk.key.fqn)) is not None
            and (key := chunk.key._replace(fqn=gauge.name)) in self._tensors
        }
        zero = set(compress(names, are_zero(list(names.values()))))
        return zero if len(zero) < len(names) else set()

    def exclude_lost_rows(self, chunks: list[Chunk], octaves: Mapping[str, Counts] | None = None) -> list[Chunk]:
        """Return the chunks except those of weights that would lose rows that training needs; these are stored exactly.

        Args:
            chunks: chunks of this rank.
            octaves: counts by octave of whole tensors, once they are known, for shards whose rows are all small
                relative to those of other ranks.
        """
        layout, tensor_means = self._context.layout, dict[str, float]()
        if layout.residual:  # errors are relative to differences
            return chunks
        weights = [chunk for chunk in chunks if chunk.group.startswith("weights/")]
        if octaves is not None:
            weights = [chunk for chunk in weights if chunk.key.shape != layout.shapes.get(chunk.key.fqn)]
            names = {chunk.key.fqn for chunk in weights} & octaves.keys()
            tensor_means = mean_squares({name: octaves[name] for name in names}, sorted(names))
        suspects, excluded = list[Chunk](), set[ChunkKey]()
        with suppress(torch.OutOfMemoryError):  # a device without memory must not fail the save for a warning
            sizes = [tensor_means.get(chunk.key.fqn) for chunk in weights]
            suspects = list(compress(weights, may_have_lost_rows([chunk.tensor for chunk in weights], sizes)))
        for chunk in suspects:
            name = chunk.key.fqn
            needed: bool | None = False
            with suppress(torch.OutOfMemoryError):
                if not has_lost_rows(chunk.tensor, tensor_means.get(name)):
                    continue
                squares = self._get_squared_gradients(chunk, self._gauges.get(name))
                needed = None if squares is None else are_rows_needed(chunk.tensor, squares, tensor_means.get(name))
            if is_exact := bool(needed) and chunk.key in self._exact_candidates:
                excluded.add(chunk.key)
            if needed is not False and self._options.history.warned_since_keyframe.get(name) is not is_exact:
                self.lost_rows[name] = is_exact
        return [chunk for chunk in chunks if chunk.key not in excluded]

    @cached_property
    def _weights_without_state(self) -> Mapping[str, bool]:
        """Weights without optimizer state by name, and whether they may be trained nevertheless."""
        layout = self._context.layout
        tied = group_tied_names((key.fqn, stored.fqn) for key, stored in self._local.tied.items())
        types, model_tensors = self._options.layer_types, layout.model_tensors
        return find_stateless_weights(layout.weights() | layout.bf16_weights, layout.shapes, tied, types, model_tensors)

    @cached_property
    def _gauges(self) -> dict[str, Gauge]:
        return find_gauges(self._context.layout)

    def _get_squared_gradients(self, chunk: Chunk, gauge: Gauge | None) -> torch.Tensor | None:
        """Return the squared gradients of a chunk of weights, if the state of the save defines them, else None."""
        gradient = self._gradients.get(chunk.key)
        if gauge is not None and gradient is None:
            gradient = self._tensors.get(chunk.key._replace(fqn=gauge.name))
        if gauge is None or gradient is None:
            return None
        squares = gradient.detach() if gauge.power == 1 else gradient.detach().float().square()
        return squares.to(chunk.tensor.device)

    def load_replicas(self, sketches: GlobalSketch) -> list[Chunk]:
        """Return the local chunks of weights that another rank writes, scaled as on that rank."""
        scales, loader = sketches.scales, self._make_loader()
        return [
            chunk.scaled(scales.exponents.get(chunk.key.fqn, 0.0), keep_parent=chunk.group not in scales.refit)
            for item in self._local.replicas
            if item.quantized and item.kind == "weights" and item.key.fqn not in sketches.nonfinite
            for chunk in [loader.load(item)]
            if chunk is not None
        ]

    def _make_loader(self) -> ChunkLoader:
        return ChunkLoader(self._parent, self._gradients, self._context.layout.residual, self._workers)


def _select_gradient_measures(items: Sequence[SaveItem], layout: Layout) -> list[SaveItem]:
    """Return optimizer state that is not quantized but defines the size of gradients."""
    is_needed = any(config.codebook.gradient_power > 0 for config in layout.groups.values())
    return [item for item in items if is_needed and item.key.fqn in layout.state and item.key.fqn not in layout.tensors]
