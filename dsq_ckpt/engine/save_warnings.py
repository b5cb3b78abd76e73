"""Warnings of a save: tensors that are not stored as configured, or that lose more than others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.engine.local_state import LocalItems, SaveItem
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.errors import NonFiniteTensor
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.groups import EXACT, find_by_suffix, kind_of, optimizer_prefix
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.lost_rows import RATIO
from dsq_ckpt.quantization.model_tensors import exclude_parameter_state
from dsq_ckpt.quantization.plan import QuantizationPlan
from dsq_ckpt.quantization.update_rules import BETAS

_LOST_ERROR = 0.95
"""Mean squared error of weights, relative to their mean square, above which they count as lost."""
_MAX_COMPARED = 16  # weights whose names are compared with all names of a model


class WarningCandidates(NamedTuple):
    """Tensors that may lose more than others, or are larger than configured.

    Attributes:
        new_weights: names of weights that were not lossy in the previous checkpoint, for warnings that are given once
            per tensor; None: all of them (a keyframe).
        rounded: first moments that are rounded since their update rule is unknown, and the names of the state that
            causes this; without those warned of before.
        fitted_to: state of L-BFGS or Rprop, because of which weights are exact; without those warned of before.
        lost_rows: names of weights with rows that a single step per tensor loses, and whether they are exact for that
            reason; without those warned of before.
    """

    new_weights: Collection[str] | None
    rounded: Mapping[str, set[str]]
    fitted_to: Collection[str]
    lost_rows: Mapping[str, bool]

    def need_gather(self, sketches: GlobalSketch) -> bool:
        """Return whether the ranks have to gather the names of their weights; equal on all ranks."""
        return bool(
            sketches.layout.tensors and (self.new_weights is None or self.new_weights or sketches.has_lost_rows)
        )


def emit_save_warnings(
    local: LocalItems, sketches: GlobalSketch, plan: QuantizationPlan, options: SaveOptions,
    candidates: WarningCandidates, comm: Communicator,
) -> None:
    """Warn of tensors that are not stored as the user may expect; collective.

    Args:
        local: chunks of this rank.
        sketches: the global sketch.
        plan: quantization plan of all ranks.
        options: options of the save.
        candidates: candidates of this rank.
        comm: communicator of the ranks that save.

    Raises:
        NonFiniteTensor: there is NaN or Inf, and the configuration asks for an error.
    """
    exact_nonfinite = plan.analysis.nonfinite - sketches.nonfinite
    too_large = sketches.nonfinite
    if too_large:
        too_large -= set().union(*gather_from_all_ranks(comm, lambda: _find_nonfinite(local.items, sketches.nonfinite)))
    lossy = sketches.nonfinite - too_large
    for warning in (_make_range_warning(too_large), _make_nonfinite_warning(lossy, exact_nonfinite, options.config)):
        if warning:
            warn(warning, rank=comm.rank)
    # On all ranks, though only rank 0 prints: if warnings are errors, all ranks must raise here.
    _warn_of_update_errors(plan.analysis, sketches.layout, options.history.warned_in_run, comm.rank)
    if not sketches.layout.residual:  # errors are relative to differences
        _warn_of_empty_base(plan.analysis, comm.rank)
    _warn_of_rounded_moments(candidates.rounded, comm.rank)
    _warn_of_exact_for_optimizer(candidates.fitted_to, comm.rank)
    _warn_of_rounding_modules(sketches.layout.rounded_weights, options.history.warned_in_run, comm.rank)
    _warn_of_optimizer_keys(sketches.layout, options, comm.rank)
    if candidates.need_gather(sketches):
        _warn_of_candidates(local.items, sketches, plan, options, candidates, comm)


def _find_nonfinite(items: list[SaveItem], suspected: frozenset[str]) -> set[str]:
    """Return the names of suspected tensors that actually hold NaN, Inf or negative second moments."""
    def has(item: SaveItem) -> bool:
        values = item.load()
        return not bool(values.isfinite().all()) or (item.kind == "exp_avg_sq" and bool((values < 0).any()))

    return {item.key.fqn for item in items if item.quantized and item.key.fqn in suspected and has(item)}


def _make_nonfinite_warning(lossy: Collection[str], exact: Collection[str], config: DSQConfig) -> str | None:
    """Return a warning of tensors with NaN or Inf, and of tensors that are not quantized and hold NaN.

    Raises:
        NonFiniteTensor: the configuration asks for an error.
    """
    parts, names, others = [], sorted(lossy), sorted(exact)
    if names:
        negative = any(kind_of(name) == "exp_avg_sq" for name in names)
        parts.append(
            f"{len(names)} tensor(s) hold NaN or Inf: {_format_names(names)}"
            + (" (of exp_avg_sq, negative values count as such)" if negative else "")
        )
    if others:
        parts.append(f"{len(others)} tensor(s) that are not quantized hold NaN: {_format_names(others)}")
    if not parts:
        return None
    if config.quantize.nonfinite == "error":
        raise NonFiniteTensor("; ".join(parts) + "; the checkpoint was not written (quantize.nonfinite is 'error')")
    if names:
        parts[0] += "; stored exactly in this checkpoint"
    return ". ".join(parts)


def _make_range_warning(names: Collection[str]) -> str | None:
    """Return a warning of tensors with finite values beyond the range that can be quantized."""
    if not names:
        return None
    return (
        f"{len(names)} tensor(s) hold finite values beyond the range of normal float32 numbers, in which they are "
        "quantized (first moments in units of Adam's update, where second moments are nearly zero, negative or not "
        "finite), or whose size is not within a factor of 2^100 (1e30) of that of others (of momentum, of 1): "
        f"{_format_names(sorted(names))}; stored exactly in this checkpoint"
    )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _warn_of_update_errors(analysis: Analysis, layout: Layout, warned: set[str], rank: int) -> None:
    """Warn, once per run, of groups of first moments whose update error exceeds its bound with the configured bits."""
    for group, fitted in analysis.fitted.items():
        codebook, max_bits = layout.groups[group].codebook, layout.groups[group].refinement_bits
        if fitted.update_error is None or not max_bits or not codebook.update_bound:
            continue
        if fitted.update_error > codebook.update_bound and group not in warned:
            warned.add(group)
            kind = group.partition("/")[0]
            warn(
                f"a restore from this checkpoint changes the optimizer's next update in '{group}' by "
                f"{fitted.update_error:.0%}, more than the {codebook.update_bound:.0%} of "
                f"quantize.{kind}.codebook.error: raise quantize.{kind}.refinement_bits, which is {max_bits}, or store "
                f"{kind} with method exact. This is said once for a run", rank=rank,
            )


def _warn_of_rounded_moments(rounded: Mapping[str, set[str]], rank: int) -> None:
    """Warn of first moments that are not quantized because their divisor is unknown, or lasts shorter than they do."""
    causes = set[str]().union(*rounded.values())
    if BETAS in causes:
        warn(
            "the first of the optimizer's betas is larger than the second: exp_avg lasts longer than exp_avg_sq, and "
            "would keep errors of the units that it is quantized in, the roots of exp_avg_sq. So it is not quantized, "
            'but rounded to bf16, 2 bytes per element. quantize.rules: [{"pattern": "*.exp_avg", "group": "linear"}] '
            "makes it smaller", rank=rank,
        )
    if beside := sorted(causes - {BETAS}):
        warn(
            f"the optimizer keeps {quote(beside)} beside exp_avg, and may divide exp_avg by that, not by the root of "
            "exp_avg_sq as Adam does; so exp_avg is not quantized, but rounded to bf16, 2 bytes per element. If the "
            'update is like Adam\'s, quantize.rules: [{"pattern": "*.exp_avg", "group": "linear"}] makes it smaller',
            rank=rank,
        )


def _warn_of_exact_for_optimizer(fitted_to: Collection[str], rank: int) -> None:
    """Warn of weights that are exact because the state of their optimizer fits no others."""
    if fitted_to:
        warn(
            f"{quote(sorted(fitted_to))} is state of {_format_optimizers(fitted_to)} that fits the very weights that "
            "it was made at: with others, L-BFGS may never make a step again, and the small steps of Rprop take long "
            "to mend them. So all weights are stored exactly. If it trains few of them, "
            'quantize.rules: [{"pattern": NAME, "group": "linear"}] makes the others smaller', rank=rank,
        )


def _warn_of_rounding_modules(rounding: Collection[str], warned: set[str], rank: int) -> None:
    """Warn, once per run, of weights that are exact because the network rounds them itself."""
    if new := sorted(set(rounding) - warned):
        warned.update(new)
        warn(
            f"the model rounds {quote(new)} in its forward pass (quantization-aware training), where an error of 1 % "
            "changes what they are rounded to; so they are stored exactly. If that costs restarts nothing, "
            'quantize.rules: [{"pattern": NAME, "group": "linear"}] makes them smaller. This is said once for a run',
            rank=rank,
        )


def _warn_of_optimizer_keys(layout: Layout, options: SaveOptions, rank: int) -> None:
    """Warn, once per run, of weights that are exact because a module is named like optimizer state."""
    config, warned = options.config.quantize, options.history.warned_in_run
    if options.layer_types is not None or config.weights.method == "exact":
        return
    new = sorted(
        name for name in layout.model_tensors - warned
        if kind_of(name) == EXACT and len(layout.shapes[name]) > 1
        and math.prod(layout.shapes[name]) >= config.min_elements
        and not any(fnmatchcase(name, rule.pattern) for rule in config.rules)
    )
    warned.update(new)
    if new and (new := exclude_parameter_state(new, layout.shapes)):
        are, key = "is" if len(new) == 1 else "are", optimizer_prefix(new[0])
        warn(
            f"{quote(new)} {are} stored exactly, as state of an optimizer is, for the name '{key}'. "
            "If it is a weight of a model, give the module too (model=), so that it is made smaller; if not, "
            'quantize.rules: [{"pattern": NAME, "exact": true}] says so. This is said once for a run', rank=rank,
        )


def _format_optimizers(fitted_to: Collection[str]) -> str:
    rprop = {name.endswith(".step_size") for name in fitted_to}
    return " and ".join(name for name, of_rprop in (("L-BFGS", False), ("Rprop", True)) if of_rprop in rprop)


def _warn_of_candidates(
    items: Sequence[SaveItem], sketches: GlobalSketch, plan: QuantizationPlan, options: SaveOptions,
    candidates: WarningCandidates, comm: Communicator,
) -> None:
    """Warn of quantized tensors that may lose more than others, or more than the user expects; collective."""
    names = candidates.new_weights

    def local() -> tuple[Collection[str], ...]:
        fitted = [
            chunk for chunk in sketches.chunks
            if chunk.group in plan.analysis.fitted and (names is None or chunk.key.fqn in names)
        ]
        exact = {name for name, is_exact in candidates.lost_rows.items() if is_exact}
        written = {chunk.key.fqn for chunk in sketches.chunks if chunk.group in plan.analysis.fitted}
        rows = (candidates.lost_rows.keys() - exact) & written
        model = options.frozen.unchanged
        quantized = {item.key.fqn for item in items if item.kind == "weights" and item.quantized and not item.by_rule}
        lossy = sorted(quantized & {chunk.key.fqn for chunk in fitted})
        if not model:
            return rows, exact, (), (), _find_untrained(sketches.layout).intersection(lossy)
        others = [fqn for fqn in lossy if find_by_suffix(fqn, model) is None]
        unfamiliar = [fqn for fqn in others[:_MAX_COMPARED] if not _is_abbreviated(fqn, model)]
        unfamiliar += others[_MAX_COMPARED:] if unfamiliar else []
        has_model = len(unfamiliar) < len(lossy) or any(
            find_by_suffix(item.key.fqn, model) is not None for item in items
        )
        return rows, exact, ("of the model",) if has_model else (), unfamiliar, ()

    ranks = gather_from_all_ranks(comm, local)
    rows, exact, unchanged, unfamiliar, untrained = (sorted(set().union(*sets)) for sets in zip(*ranks, strict=True))
    if rows:
        warn(
            f"rows or columns of {_format_names(rows)} are more than {RATIO} times smaller than the others, or vary "
            "that little around a mean, and after a restore they, or their differences, may be off by half of their "
            "size or more. If these count for anything (columns in other units, positions far from the origin), store "
            'the tensor exactly, by quantize.rules: [{"pattern": NAME, "exact": true}], or in parts', rank=comm.rank,
        )
    if exact:
        warn(
            f"rows or columns of {_format_names(exact)} are more than {RATIO} times smaller than the others, or vary "
            "that little around a mean, and training needs them: these tensors are stored exactly. With inputs of one "
            "size, a tensor for each unit of columns, or means taken off, they would be small too", rank=comm.rank,
        )
    if untrained:
        warn(
            f"{quote(untrained)} is quantized as weights are, and no state of the optimizer has its shape. If it is a "
            "buffer, give the module too (model=), so that it is exact; if it is data, store it exactly, by "
            'quantize.rules: [{"pattern": NAME, "exact": true}]; if another optimizer trains it, nothing is wrong',
            rank=comm.rank,
        )
    if unfamiliar and unchanged:
        warn(
            f"{quote(unfamiliar)} lies beside the model and is quantized as weights are: if it is data, such as "
            "observations, targets or statistics, store it exactly, by "
            'quantize.rules: [{"pattern": NAME, "exact": true}]; if it is another model, or an average of weights, '
            "nothing is wrong", rank=comm.rank,
        )
    elif unfamiliar:
        names = sorted(options.frozen.unchanged)
        warn(
            f"`model` has nothing of what is saved: {_format_names(names)} there, {_format_names(unfamiliar)} in the "
            "state dict. So it does not tell which weights are frozen and which are buffers, and these are lossy: "
            "pass the module whose state is saved, or none", rank=comm.rank,
        )


def _find_untrained(layout: Layout) -> set[str]:
    """Return weights whose shapes no optimizer state has; empty if optimizer state has shapes that no weights have."""
    weights = {layout.shapes[fqn] for fqn in layout.model_tensors}
    state = layout.shapes.keys() - layout.model_tensors
    trained = {layout.shapes[fqn] for fqn in state if len(layout.shapes[fqn]) > 1}
    if not trained or not trained <= weights:
        return set()
    return {fqn for fqn in layout.weights() if layout.shapes[fqn] not in trained}


def _is_abbreviated(fqn: str, names: Collection[str]) -> bool:
    """Return whether a name is one of `names` without some components, as PEFT omits the name of an adapter."""
    parts = strip_wrappers(fqn).split(".")

    def has(name: str) -> bool:
        components = iter(name.split("."))
        return all(part in components for part in parts)

    return any(map(has, names))


def _warn_of_empty_base(analysis: Analysis, rank: int) -> None:
    """Warn of a base layer in which most weights are about as inaccurate as zeros."""
    sizes = {
        group: int(fitted.counts.sum()) for group, fitted in analysis.fitted.items()
        if group.startswith("weights/") and fitted.mean_square
    }
    losses = [
        group for group in sizes if analysis.fitted[group].error > _LOST_ERROR * analysis.fitted[group].mean_square
    ]
    if 2 * sum(sizes[group] for group in losses) > sum(sizes.values()):
        warn(
            "the base layer of this checkpoint, which is what the history keeps, holds next to nothing of the weights "
            f"in {', '.join(losses)}: a step this coarse was configured, or `evaluate` tells hardly any difference to "
            "weights of zero (as in the first steps of a run, or if its metric has a large constant part). Where that "
            "is not meant, lower search.epsilon, or the step", rank=rank,
        )
