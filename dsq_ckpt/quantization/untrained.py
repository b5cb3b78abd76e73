"""Weights that no optimizer of a save trains, where no model tells which are frozen: they have no state.

State is named by its parameter, as `get_optimizer_state_dict` does it, or by the number of it, as the optimizer itself
does. Numbers tell no names, only how many parameters of a shape are trained; if there are more weights of it, each may
be one that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from dsq_ckpt.quantization.groups import kind_of, unwrapped
from dsq_ckpt.quantization.numbered import Shape, numbered


def may_be_untrained(
    weights: Collection[str], shapes: Mapping[str, Shape], tied: Mapping[str, Collection[str]]
) -> set[str]:
    """Return the weights that the state of optimizers leaves in doubt; none where it tells of no weight at all.

    Args:
        weights: names of lossy weights.
        shapes: shapes of all tensors of the save.
        tied: other names of the memory of a weight, by its name.
    """
    state = [name for name in shapes if kind_of(name) != "weights" and _state(name)]
    if not weights or not state:
        return set()
    by_number = {name: found for name in state if (found := numbered(name)) is not None}
    if not by_number:
        return _by_name(weights, shapes, state, tied)
    return _by_number(weights, shapes, by_number, tied) if len(by_number) == len(state) else set()


def _by_name(
    weights: Collection[str], shapes: Mapping[str, Shape], state: Collection[str], tied: Mapping[str, Collection[str]]
) -> set[str]:
    """Return the weights by whose name no state goes, if all state of matrices goes by the name of some weight."""
    owners = {name: _owner(name) for name in state}
    beginnings = {owner: _beginnings(owner) for owner in set(owners.values())}
    every = {one for found in beginnings.values() for one in found}
    owned = {
        name: next((tail for tail in _tails(unwrapped(name)) if tail in every), None)
        for name in shapes if kind_of(name) == "weights"
    }
    matrices = {owner for name, owner in owners.items() if len(shapes[name]) > 1}
    found = set(owned.values()) - {None}
    if not found or any(found.isdisjoint(beginnings[owner]) for owner in matrices):
        return set()
    return {name for name in weights if not any(owned.get(one) for one in (name, *tied.get(name, ())))}


def _by_number(
    weights: Collection[str], shapes: Mapping[str, Shape], state: Mapping[str, tuple[str, int]],
    tied: Mapping[str, Collection[str]],
) -> set[str]:
    """Return the weights of shapes that more weights of a model have than state is there for."""
    named = {other for others in tied.values() for other in others}
    models: dict[str, Counter[Shape]] = {}
    for name, shape in shapes.items():
        if kind_of(name) == "weights" and name not in named:
            models.setdefault(name.partition(".")[0], Counter())[shape] += 1
    known = set[Shape]().union(*models.values())
    own: dict[tuple[str, int], set[Shape]] = {}
    for name, number in state.items():
        own.setdefault(number, set()).add(shapes[name])
    trained = Counter(shape for found in own.values() for shape in found & known)
    if any(found.isdisjoint(known) for found in own.values()):  # it is not kept in the parameter's shape
        return set()
    return {name for name in weights if models[name.partition(".")[0]][shapes[name]] > trained[shapes[name]]}


def _state(name: str) -> str:
    """Return the name of a parameter, and of what an optimizer keeps for it; empty for other tensors."""
    return f".{name}".partition(".state.")[2]


def _owner(name: str) -> str:
    """Return the name of the parameter that state belongs to, or a longer one, of what the optimizer keeps below it."""
    return unwrapped(_state(name).rpartition(".")[0])


def _beginnings(name: str) -> list[str]:
    """Return the names that a name begins with."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _tails(name: str) -> Iterator[str]:
    """Yield the names that a name ends with, the longest first."""
    while name:
        yield name
        name = name.partition(".")[2]


def other_names(tied: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the other names of a weight's memory, by its name, from pairs of another name and the stored one."""
    found: dict[str, set[str]] = {}
    for other, stored in tied:
        found.setdefault(stored, set()).add(other)
    return found
