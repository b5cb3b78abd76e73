"""Tensors that are of models, told by the names of all that is saved.

A module may be named as the keys are that optimizers' state lies below: `self.state`, `self.opt`. How its tensors are
stored is decided by their own names, and by the model where it is given (see `groups`). Which weights an optimizer
trains is asked of all tensors; there a key is an optimizer's only if there is state below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from dsq_ckpt.quantization.groups import EXACT, MODELS, key_of_optimizer, kind_of

_ENDS = (".weight", ".bias")


def of_models(
    names: Collection[str], weights: Collection[str], types: Mapping[str, str] | None = None
) -> set[str]:
    """Return the names of parameters and buffers of models.

    Args:
        names: of all tensors of a save.
        weights: those that are known to be weights.
        types: layer types of the model; None: names alone tell.
    """
    found = {name for name in names if name in weights or kind_of(name, types) == "weights"}
    below: dict[str, list[str]] = {}
    for name in names:
        if name not in found and (key := key_of_optimizer(name)):
            below.setdefault(key, []).append(name)
    for key, own in below.items():
        if _is_module(key, own):
            found.update(own)
    return found


def without_twins(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names below a key of an optimizer that do not end as a tensor of the same shape is called elsewhere.

    State of an optimizer that goes by the names of weights (`opt_state.mu.layer.weight` beside `model.layer.weight`)
    does, and weights of a module do not.
    """
    called = {
        (part, shape) for name, shape in shapes.items() if not key_of_optimizer(name)
        for part in (name, name.partition(".")[2]) if "." in part  # `weight` alone is the end of most names
    }
    return [
        name for name in names
        if called.isdisjoint((tail, shapes[name]) for tail in tails(name.removeprefix(key_of_optimizer(name))[1:]))
    ]


def tails(name: str) -> Iterator[str]:
    """Yield the names that a name ends with, the longest first."""
    while name:
        yield name
        name = name.partition(".")[2]


def _is_module(key: str, names: Sequence[str]) -> bool:
    """Return whether names below a key of an optimizer are those of a module: no moments, and no `state` of anything.

    An optimizer that we do not know gives other names to its state than `weight` and `bias`.
    """
    if any(kind_of(name) != EXACT for name in names):
        return False
    if key.partition(".")[0].lower() in MODELS:
        return True
    named = any(name == key or name.endswith(_ENDS) for name in names)
    return named and not any(".state." in name[len(key):] for name in names)
