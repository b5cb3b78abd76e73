"""Match weights with optimizer state that is named by numbers, as in `torch.optim.Optimizer.state_dict`.

A number is the position of a parameter in the parameter groups, which the state of a save does not record. Within
groups, parameters nearly always have the order of the module's state dict. So of the matrices of one shape, the first
number belongs to the first weight, if there are as many of both. A wrong match costs only precision: a weight gets the
step of another weight of its shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from dsq_ckpt.quantization.groups import is_optimizer_key
from dsq_ckpt.quantization.model_tensors import find_model_tensors

Shape = tuple[int, ...]

_NUMBERED = re.compile(r"(?P<optimizer>(.*\.)?state)\.(?P<number>\d+)\.\w+")


def parse_numbered_name(name: str) -> tuple[str, int] | None:
    """Return the optimizer prefix and the parameter number in a name of state; None if it has no number."""
    match = _NUMBERED.fullmatch(name)
    if match is None or _is_parameter_name(match["optimizer"]):
        return None
    return match["optimizer"], int(match["number"])


def _is_parameter_name(optimizer: str) -> bool:
    """Return whether a prefix contains the name of a parameter below a key `state`, such as of `self.state[0]`."""
    *outer, _ = optimizer.split(".")
    while outer:
        if is_optimizer_key(key := outer.pop()):
            return key == "state"
    return False


def is_numbered_name(name: str) -> bool:
    """Return whether a name is that of state by the number of a parameter."""
    return parse_numbered_name(name) is not None


def match_state_to_weights(
    state: Iterable[str], shapes: Mapping[str, Shape], of_model: Collection[str] | None = None
) -> dict[str, str]:
    """Return the name of the matching state by the name of a weight, where the match is unique.

    Args:
        state: names of one kind of state, such as `exp_avg_sq`; names without a number are ignored.
        shapes: shapes of all tensors of the save, in the order of its state dict.
        of_model: names of parameters and buffers of models; None: found by name.

    Returns:
        Weights of two or more dimensions. Weights that match state of several optimizers have no entry. Copies of a
        model, such as an average of its weights, have the same state.
    """
    optimizers: dict[str, dict[Shape, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for name in state:
        if (parsed := parse_numbered_name(name)) is not None and len(shapes[name]) > 1:
            optimizers[parsed[0]][shapes[name]].append((parsed[1], name))
    if not optimizers:
        return {}
    models: dict[str, dict[Shape, list[str]]] = defaultdict(lambda: defaultdict(list))
    of_model = find_model_tensors(shapes, ()) if of_model is None else of_model
    for name, shape in shapes.items():
        if len(shape) > 1 and name in of_model:
            models[name.partition(".")[0]][shape].append(name)
    matches: dict[str, set[str]] = defaultdict(set)
    for own_state in optimizers.values():
        for model in models.values():
            others = [shape for shape in model if len(model[shape]) != len(own_state.get(shape, ()))]
            for shape in model.keys() & own_state.keys():
                names = [name for _, name in sorted(own_state[shape])]
                if others == [shape] and (len(names), len(model[shape])) == (1, 2):
                    names *= 2  # all other weights are trained once, so these two are one tied parameter
                if len(names) == len(model[shape]):
                    for weight, name in zip(model[shape], names, strict=True):
                        matches[weight].add(name)
    return {weight: states.pop() for weight, states in matches.items() if len(states) == 1}
