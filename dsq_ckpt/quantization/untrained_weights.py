"""Find weights that no optimizer of a save trains, by the names and shapes of optimizer state.

State is named by its parameter, as by `get_optimizer_state_dict`, or by the parameter's number, as by the optimizer
itself. Numbers show only how many parameters of a shape are trained: if more weights have that shape, any of them may
be untrained. The same holds for several models whose weights match the names of one state: one model may be an average
of the other, or a frozen reference. Of these, the model below the key `model` is taken to be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.model_tensors import find_model_tensors, name_suffixes
from dsq_ckpt.quantization.numbered_state import Shape, parse_numbered_name

_MODEL = "model"


def find_stateless_weights(
    weights: Collection[str], shapes: Mapping[str, Shape], tied: Mapping[str, Collection[str]],
    types: Mapping[str, str] | None = None, of_model: Collection[str] | None = None,
) -> dict[str, bool]:
    """Return the weights that optimizer state does not name, and whether each may be trained nevertheless.

    Empty if the state matches no weight at all.

    Args:
        weights: names of lossy weights.
        shapes: shapes of all tensors of the save.
        tied: other names of the storage of a weight, by its name.
        types: layer types of the model; None: model tensors are found by name.
        of_model: names of the model tensors, if known.
    """
    tensors = find_model_tensors(shapes, weights, types) if types or of_model is None else of_model
    state = [name for name in shapes if name not in tensors and kind_of(name) != "weights" and _state_suffix(name)]
    if not weights or not state:
        return {}
    numbers = {name: number for name in state if (number := parse_numbered_name(name)) is not None}
    if not numbers:
        return _find_by_name(weights, shapes, tensors, state, tied)
    return _find_by_number(weights, shapes, tensors, numbers, tied) if len(numbers) == len(state) else {}


def _find_by_name(
    weights: Collection[str], shapes: Mapping[str, Shape], tensors: Collection[str], state: Collection[str],
    tied: Mapping[str, Collection[str]],
) -> dict[str, bool]:
    """Return the weights whose name no state has; empty unless all state of matrices has the name of some weight."""
    owners = {name: _state_owner(name) for name in state}
    state_shapes: dict[str, set[Shape]] = {}  # by prefix of the owner's name
    for name, owner in owners.items():
        for prefix in _name_prefixes(owner):
            state_shapes.setdefault(prefix, set()).add(shapes[name])
    aliases = {alias for others in tied.values() for alias in others}
    matches: dict[str, list[str]] = {}
    for name in shapes:
        if name in tensors and (
            suffix := next((ending for ending in name_suffixes(strip_wrappers(name)) if ending in state_shapes), "")
        ):
            matches.setdefault(suffix, []).append(name)
    matrices = {owner for name, owner in owners.items() if len(shapes[name]) > 1}
    if not matches or any(matches.keys().isdisjoint(_name_prefixes(owner)) for owner in matrices):
        return {}
    trained = set[str]()
    for suffix, names in matches.items():
        same_shape = [name for name in names if shapes[name] in state_shapes[suffix]] or names
        untied = [name for name in same_shape if name not in aliases]
        likely = [
            name for name in untied if _last_key(strip_wrappers(name).removesuffix(suffix).rstrip(".")) in ("", _MODEL)
        ]
        trained.update(same_shape if len(untied) < 2 else likely)
    matched = {name for names in matches.values() for name in names}
    return {name: name in matched for name in weights if trained.isdisjoint((name, *tied.get(name, ())))}


def _find_by_number(
    weights: Collection[str], shapes: Mapping[str, Shape], tensors: Collection[str],
    state: Mapping[str, tuple[str, int]], tied: Mapping[str, Collection[str]],
) -> dict[str, bool]:
    """Return the weights of each shape that more weights have than numbered parameters."""
    aliases = {alias for others in tied.values() for alias in others}
    untied = [name for name in tensors if name not in aliases]
    by_number: dict[tuple[str, int], set[Shape]] = {}
    for name, number in state.items():
        by_number.setdefault(number, set()).add(shapes[name])
    state_shapes = [each - {()} or each for each in by_number.values()]
    trained = Counter(shape for each in state_shapes for shape in each)
    total = Counter(shapes[name] for name in untied)
    if any(len(each) > 1 for each in state_shapes) or trained - total:  # state has not the parameter's shape
        return {}
    model = Counter(shapes[name] for name in untied if _is_below_model(name))
    return {
        name: shapes[name] in trained for name in weights
        if (model if _is_below_model(name) else total)[shapes[name]] > trained[shapes[name]]
    }


def _last_key(name: str) -> str:
    return name.rpartition(".")[2]


def _is_below_model(name: str) -> bool:
    return name.startswith(f"{_MODEL}.")


def _state_suffix(name: str) -> str:
    """Return the part of a name after the key `state`: parameter and kind of state; empty for other tensors."""
    return f".{name}".partition(".state.")[2]


def _state_owner(name: str) -> str:
    """Return the parameter that state belongs to, possibly followed by keys of nested state."""
    return strip_wrappers(_state_suffix(name).rpartition(".")[0])


def _name_prefixes(name: str) -> list[str]:
    """Return the dotted prefixes of a name, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def group_tied_names(tied: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the other names of each stored weight, from pairs of another name and the stored name."""
    names: dict[str, set[str]] = {}
    for alias, stored in tied:
        names.setdefault(stored, set()).add(alias)
    return names
