"""`explore`: one checkpoint compressed within several bounds, to choose a trade-off of size and degradation."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from dsq_ckpt.api.oneshot import Evaluate, StateLike, compress
from dsq_ckpt.api.oneshot_config import is_valid_bound
from dsq_ckpt.api.saving import ConfigLike
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.paths import resolve_local_path
from dsq_ckpt.storage.target_directory import refuse_target

BOUNDS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


class Tradeoff(NamedTuple):
    """Size and degradation of a checkpoint that `explore` wrote.

    Attributes:
        max_degradation: the bound, relative to the metric of the source.
        degradation: degradation of the metric, relative to that of the source; negative: it is better; None: no
            configuration is within the bound, and `search.fallback` is `conservative`.
        check_degradation: the same, measured by `check`; None without `check` too.
        exact: weights are stored exactly, since no configuration is within the bound.
        bytes_logical: uncompressed size of the source's tensors in bytes.
        bytes_kept: size of the checkpoint in bytes.
        evaluations: number of calls of `evaluate`.
        seconds: duration of the search and the write.
        on_front: on the Pareto front: no other checkpoint is at most as large and degrades at most as much.
        path: the checkpoint directory.
    """

    max_degradation: float
    degradation: float | None
    check_degradation: float | None
    exact: bool
    bytes_logical: int
    bytes_kept: int
    evaluations: int
    seconds: float
    on_front: bool
    path: Path


def explore(
    source: StateLike,
    directory: str | os.PathLike[str],
    *,
    evaluate: Evaluate,
    bounds: Sequence[float] = BOUNDS,
    config: ConfigLike = None,
    check: Evaluate | None = None,
    probes: int = 64,
    model: nn.Module | None = None,
    overwrite: bool = False,
    progress: Callable[[Tradeoff], None] | None = None,
) -> list[Tradeoff]:
    """Compress one checkpoint within several bounds, each into a directory of its own.

    The checkpoint of each bound is the one that `compress` writes with that `max_degradation`. Keep the one you choose,
    and delete the others.

    Args:
        source: as for `compress`.
        directory: parent directory of the checkpoints: `directory/within-0.01` for the bound 0.01.
        evaluate: as for `compress`.
        bounds: values of `max_degradation`: 0.01 is 1 %.
        config: as for `compress`.
        check: as for `compress`.
        probes: as for `compress`, for each bound.
        model: as for `compress`.
        overwrite: replace complete checkpoints.
        progress: called with each checkpoint when it is written; its `on_front` compares it with the ones before.

    Returns:
        One for each bound, the loosest first, down to the first bound that no configuration is within. Its weights are
        exact, unless `config` sets `search.fallback`, as they would be for all tighter bounds.

    Raises:
        ConfigError: there are no bounds, or a bound occurs twice; else as for `compress`.
        DSQError: as for `compress`. The checkpoints of earlier bounds are complete, and stay.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> def loss():
        ...     return float(model(torch.ones(256)).square().mean())
        >>> found = dsq_ckpt.explore(model, "front", evaluate=loss, bounds=[0.1, 0.01])
        >>> [one.path.name for one in found]
        ['within-0.1', 'within-0.01']
    """
    directory_path = resolve_local_path(directory)
    proper = isinstance(bounds, Iterable) and not isinstance(bounds, str) and all(map(is_valid_bound, bounds))
    targets = {bound: directory_path / f"within-{bound:g}" for bound in sorted(bounds, reverse=True)} if proper else {}
    if not targets or len({path.name for path in targets.values()}) != len(bounds):
        raise ConfigError(
            f"bounds are {bounds!r}; expected a list of one number or more above 0 and below 1, such as 0.01 for 1 %, "
            "each once"
        )
    for path in targets.values():
        refuse_target(path, overwrite)  # before the first search, which may take long
    tradeoffs: list[Tradeoff] = []
    for bound, path in targets.items():
        began = time.monotonic()
        description = compress(
            source, path, config=config, evaluate=evaluate, check=check, max_degradation=bound, probes=probes,
            model=model, overwrite=overwrite,
        )
        quality = description["quality"]
        exact = "weights" not in description["by_kind"]
        loss, checked = quality.get("degradation"), quality.get("check_degradation")
        tradeoffs = _mark_front([*tradeoffs, Tradeoff(
            bound, 0.0 if exact else loss, 0.0 if exact and check else checked, exact, description["bytes_logical"],
            description["bytes_kept"], quality["evaluations"], time.monotonic() - began, True, path,
        )])
        if progress is not None:
            progress(tradeoffs[-1])
        if quality["chosen"] is None:
            break
    return tradeoffs


def _mark_front(tradeoffs: Sequence[Tradeoff]) -> list[Tradeoff]:
    """Set `on_front` of all checkpoints."""
    def is_dominated(one: Tradeoff, index: int) -> bool:
        return any(
            (other.bytes_kept, _worst_degradation(other), position) < (one.bytes_kept, _worst_degradation(one), index)
            and other.bytes_kept <= one.bytes_kept and _worst_degradation(other) <= _worst_degradation(one)
            for position, other in enumerate(tradeoffs) if position != index
        )

    return [tradeoff._replace(on_front=not is_dominated(tradeoff, number)) for number, tradeoff in enumerate(tradeoffs)]


def _worst_degradation(tradeoff: Tradeoff) -> float:
    """Return the larger of the degradations measured by `evaluate` and by `check`; infinity if neither is known."""
    values = [value for value in (tradeoff.degradation, tradeoff.check_degradation) if value is not None]
    return max(values) if values else math.inf
