"""Names of the parameters that an optimizer's state dict has by numbers.

A `CheckpointIO` receives state dicts, and no model. Quantization steps of weights depend on their second moments, so a
moment must have the name of its weight. Without names, or with wrong names, steps depend on the weights alone, and the
error of the weights is larger at the same size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

_SHAPED_ENTRIES = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # entries with the parameter's shape
Shape = tuple[int, ...]


def infer_parameter_names(optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[Hashable, str]:
    """Return a unique name for each parameter of an optimizer's state dict, by number.

    An optimizer that was constructed from `named_parameters()` has names. Otherwise each parameter group is assumed to
    be in the order of `model.parameters()`, and a parameter gets a name if shapes allow only one. Other parameters are
    named by their number, such as `#3`.

    Args:
        optimizer: `state_dict()` of an optimizer.
        weights: `state_dict()` of the model.
    """
    candidates = [(name, tuple(value.shape)) for name, value in weights.items() if isinstance(value, torch.Tensor)]
    names: dict[Hashable, str | None] = {}
    for group in optimizer["param_groups"]:
        group_names = group.get("param_names")
        if group_names is None or len(group_names) != len(group["params"]):
            shapes = [_infer_shape(optimizer["state"].get(key)) for key in group["params"]]
            group_names = find_unique_names(shapes, candidates)
        names.update(zip(group["params"], group_names, strict=True))
    count = Counter(names.values())
    return {
        key: name if isinstance(name, str) and count[name] == 1 and "#" not in name else f"#{key}"
        for key, name in names.items()
    }


def find_unique_names(shapes: Sequence[Shape | None], candidates: Sequence[tuple[str, Shape]]) -> list[str | None]:
    """Match shapes to candidates in order; return the name for each shape that has only one possible match, else None.

    Args:
        shapes: shapes of parameters; None is an unknown shape, which matches any.
        candidates: names and shapes of tensors, some of which may belong to no parameter.
    """
    first = _match_in_order(shapes, candidates)
    last = _match_in_order(shapes[::-1], candidates[::-1])
    if first is None or last is None:
        return [None] * len(shapes)
    return [name if name == other_name else None for name, other_name in zip(first, reversed(last), strict=True)]


def _match_in_order(shapes: Iterable[Shape | None], candidates: Iterable[tuple[str, Shape]]) -> list[str] | None:
    """Return the names of the first candidates that match the shapes in order, or None."""
    remaining = iter(candidates)
    names = [next((name for name, other in remaining if shape in (None, other)), None) for shape in shapes]
    return None if None in names else names  # type: ignore[return-value]


def _infer_shape(entries: Any) -> Shape | None:
    values = (entries.get(name) for name in _SHAPED_ENTRIES) if isinstance(entries, Mapping) else ()
    return next((tuple(value.shape) for value in values if isinstance(value, torch.Tensor)), None)
