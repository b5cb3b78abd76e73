"""Find the tensors of models among all tensors of a save, by name.

A module may have a name that also prefixes optimizer state, such as `self.state` or `self.opt`. How its tensors are
stored depends on their own names, and on the model where it is known (see `groups`). Which weights an optimizer trains
depends on all tensors: a key belongs to an optimizer only if there is state below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from dsq_ckpt.quantization.groups import EXACT, MODEL_KEYS, kind_of, optimizer_prefix

_ENDS = (".weight", ".bias")


def find_model_tensors(
    names: Collection[str], weights: Collection[str], types: Mapping[str, str] | None = None
) -> set[str]:
    """Return the names of parameters and buffers of models.

    Args:
        names: names of all tensors of a save.
        weights: names that are known to be weights.
        types: layer types of the model; None: only names are known.
    """
    tensors = {name for name in names if name in weights or kind_of(name, types) == "weights"}
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        if name not in tensors and (key := optimizer_prefix(name)):
            by_prefix.setdefault(key, []).append(name)
    for key, own_names in by_prefix.items():
        if _is_module(key, own_names):
            tensors.update(own_names)
    return tensors


def exclude_parameter_state(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names below an optimizer key without state that is named by parameters.

    A name is left out if it ends with the name of a tensor of the same shape outside of optimizer keys, such as
    `opt_state.mu.layer.weight` beside `model.layer.weight`. Weights of a module do not end so.
    """
    outside = {
        (suffix, shape) for name, shape in shapes.items() if not optimizer_prefix(name)
        for suffix in (name, name.partition(".")[2]) if "." in suffix  # `weight` alone is the end of most names
    }
    return [
        name for name in names
        if outside.isdisjoint(
            (suffix, shapes[name]) for suffix in name_suffixes(name.removeprefix(optimizer_prefix(name))[1:])
        )
    ]


def name_suffixes(name: str) -> Iterator[str]:
    """Yield the dotted suffixes of a name, the longest first."""
    while name:
        yield name
        name = name.partition(".")[2]


def _is_module(key: str, names: Sequence[str]) -> bool:
    """Return whether the names below an optimizer key are those of a module: no moments, and no `state` key.

    Unknown optimizers do not name their state `weight` or `bias`.
    """
    if any(kind_of(name) != EXACT for name in names):
        return False
    if key.partition(".")[0].lower() in MODEL_KEYS:
        return True
    has_parameter = any(name == key or name.endswith(_ENDS) for name in names)
    return has_parameter and not any(".state." in name[len(key):] for name in names)
