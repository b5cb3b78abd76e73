"""Names of the parameters that an optimizer's state dict knows by numbers.

A `CheckpointIO` is given state dicts, and no model. Weights are quantized in steps that follow their second moments, so
a moment has to be known by the name of its weight. Without names, steps follow the weights alone, which are then
further off at the same size; so they are with wrong names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of the shape of the parameter
Shape = tuple[int, ...]


def parameter_names(optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[Hashable, str]:
    """Return a name for each parameter of an optimizer's state dict, all different.

    An optimizer that was made of `named_parameters()` has names. Else a group of parameters is taken to be in the order
    of the model, as `parameters()` returns them, and a parameter gets the name of the only tensor that shapes then
    allow. Others are called by their number, as in `#3`.

    Args:
        optimizer: `state_dict()` of an optimizer.
        weights: `state_dict()` of the model.
    """
    candidates = [(name, tuple(value.shape)) for name, value in weights.items() if isinstance(value, torch.Tensor)]
    found: dict[Hashable, str | None] = {}
    for group in optimizer["param_groups"]:
        given = group.get("param_names")
        if given is None or len(given) != len(group["params"]):
            given = only_names([_shape(optimizer["state"].get(key)) for key in group["params"]], candidates)
        found.update(zip(group["params"], given, strict=True))
    count = Counter(found.values())
    return {
        key: name if isinstance(name, str) and count[name] == 1 and "#" not in name else f"#{key}"
        for key, name in found.items()
    }


def only_names(shapes: Sequence[Shape | None], candidates: Sequence[tuple[str, Shape]]) -> list[str | None]:
    """Return the name of each shape where there is but one way to find the shapes among candidates, in order.

    Args:
        shapes: shapes of parameters; None: not known, so that any may be it.
        candidates: names and shapes, of which some may belong to no parameter.
    """
    first = _greedy(shapes, candidates)
    last = _greedy(shapes[::-1], candidates[::-1])
    if first is None or last is None:
        return [None] * len(shapes)
    return [one if one == other else None for one, other in zip(first, reversed(last), strict=True)]


def _greedy(shapes: Iterable[Shape | None], candidates: Iterable[tuple[str, Shape]]) -> list[str] | None:
    """Return the first candidates in order that have these shapes; None: there are none."""
    left = iter(candidates)
    found = [next((name for name, other in left if shape in (None, other)), None) for shape in shapes]
    return None if None in found else found  # type: ignore[return-value]


def _shape(entries: Any) -> Shape | None:
    values = (entries.get(name) for name in _SHAPED) if isinstance(entries, Mapping) else ()
    return next((tuple(value.shape) for value in values if isinstance(value, torch.Tensor)), None)
