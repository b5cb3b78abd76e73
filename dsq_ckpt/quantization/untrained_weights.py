"""Weights that no optimizer of a save trains, as far as the state of the optimizers tells.

State is named by its parameter, as `get_optimizer_state_dict` does it, or by the number of it, as the optimizer itself
does. Numbers tell no names, only how many parameters of a shape are trained; if there are more weights of it, each may
be one that is not. So may each of several models whose weights have the names of one state: one may be an average of
the other, or a frozen reference. Of these the one below the key `model` is taken to be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.model_tensors import of_models, tails
from dsq_ckpt.quantization.numbered_state import Shape, numbered

_MODEL = "model"


def may_be_untrained(
    weights: Collection[str], shapes: Mapping[str, Shape], tied: Mapping[str, Collection[str]],
    types: Mapping[str, str] | None = None, of_model: Collection[str] | None = None,
) -> dict[str, bool]:
    """Return the weights that the state of optimizers does not name, and whether they may be trained all the same.

    Where the state tells of no weight at all, there are none.

    Args:
        weights: names of lossy weights.
        shapes: shapes of all tensors of the save.
        tied: other names of the memory of a weight, by its name.
        types: layer types of the model; None: names alone tell what is the model's.
        of_model: what they tell, where it is known already.
    """
    own = of_models(shapes, weights, types) if types or of_model is None else of_model
    state = [name for name in shapes if name not in own and kind_of(name) != "weights" and _state(name)]
    if not weights or not state:
        return {}
    by_number = {name: found for name in state if (found := numbered(name)) is not None}
    if not by_number:
        return _by_name(weights, shapes, own, state, tied)
    return _by_number(weights, shapes, own, by_number, tied) if len(by_number) == len(state) else {}


def _by_name(
    weights: Collection[str], shapes: Mapping[str, Shape], own: Collection[str], state: Collection[str],
    tied: Mapping[str, Collection[str]],
) -> dict[str, bool]:
    """Return the weights by whose name no state goes, if all state of matrices goes by the name of some weight."""
    owners = {name: _owner(name) for name in state}
    sizes: dict[str, set[Shape]] = {}  # of state, by the names that its own begins with
    for name, owner in owners.items():
        for one in _beginnings(owner):
            sizes.setdefault(one, set()).add(shapes[name])
    named = {other for others in tied.values() for other in others}
    fitting: dict[str, list[str]] = {}
    for name in shapes:
        if name in own and (tail := next((one for one in tails(strip_wrappers(name)) if one in sizes), "")):
            fitting.setdefault(tail, []).append(name)
    matrices = {owner for name, owner in owners.items() if len(shapes[name]) > 1}
    if not fitting or any(fitting.keys().isdisjoint(_beginnings(owner)) for owner in matrices):
        return {}
    trained = set[str]()
    for tail, names in fitting.items():
        alike = [name for name in names if shapes[name] in sizes[tail]] or names
        alone = [name for name in alike if name not in named]
        likely = [name for name in alone if _last(strip_wrappers(name).removesuffix(tail).rstrip(".")) in ("", _MODEL)]
        trained.update(alike if len(alone) < 2 else likely)
    fit = {name for names in fitting.values() for name in names}
    return {name: name in fit for name in weights if trained.isdisjoint((name, *tied.get(name, ())))}


def _by_number(
    weights: Collection[str], shapes: Mapping[str, Shape], own: Collection[str],
    state: Mapping[str, tuple[str, int]], tied: Mapping[str, Collection[str]],
) -> dict[str, bool]:
    """Return the weights of shapes that more weights have than state is there for."""
    named = {other for others in tied.values() for other in others}
    there = [name for name in own if name not in named]
    by_number: dict[tuple[str, int], set[Shape]] = {}
    for name, number in state.items():
        by_number.setdefault(number, set()).add(shapes[name])
    kept = [found - {()} or found for found in by_number.values()]
    trained = Counter(shape for found in kept for shape in found)
    whole = Counter(shapes[name] for name in there)
    if any(len(found) > 1 for found in kept) or trained - whole:  # it is not kept in the parameter's shape
        return {}
    model = Counter(shapes[name] for name in there if _is_of_model(name))
    return {
        name: shapes[name] in trained for name in weights
        if (model if _is_of_model(name) else whole)[shapes[name]] > trained[shapes[name]]
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_of_model(name: str) -> bool:
    return name.startswith(f"{_MODEL}.")


def _state(name: str) -> str:
    """Return the name of a parameter, and of what an optimizer keeps for it; empty for other tensors."""
    return f".{name}".partition(".state.")[2]


def _owner(name: str) -> str:
    """Return the name of the parameter that state belongs to, or a longer one, of what the optimizer keeps below it."""
    return strip_wrappers(_state(name).rpartition(".")[0])


def _beginnings(name: str) -> list[str]:
    """Return the names that a name begins with."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def other_names(tied: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the other names of a weight's memory, by its name, from pairs of another name and the stored one."""
    found: dict[str, set[str]] = {}
    for other, stored in tied:
        found.setdefault(stored, set()).add(other)
    return found
