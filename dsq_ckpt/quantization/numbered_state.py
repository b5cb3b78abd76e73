"""Weights of an optimizer's state that is named by numbers, as `torch.optim.Optimizer.state_dict` has it.

A number is the place of a parameter in the optimizer's groups, which the state of a save does not tell. Within groups
parameters nearly always come in the order of the module's state dict; so of the matrices of one shape, the first number
belongs to the first weight, if there are as many of both. A wrong guess costs precision, and never more: a weight gets
the step of another one of its shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from dsq_ckpt.quantization.groups import is_of_optimizers
from dsq_ckpt.quantization.model_tensors import of_models

Shape = tuple[int, ...]

_NUMBERED = re.compile(r"(?P<optimizer>(.*\.)?state)\.(?P<number>\d+)\.\w+")


def numbered(name: str) -> tuple[str, int] | None:
    """Return the optimizer and the number of the parameter whose state has a name; None if it has no number."""
    found = _NUMBERED.fullmatch(name)
    if found is None or _is_of_parameter(found["optimizer"]):
        return None
    return found["optimizer"], int(found["number"])


def _is_of_parameter(optimizer: str) -> bool:
    """Return whether a name goes on below a key `state`: that of a parameter does, as of `self.state[0]`."""
    *outer, _ = optimizer.split(".")
    while outer:
        if is_of_optimizers(part := outer.pop()):
            return part == "state"
    return False


def is_numbered(name: str) -> bool:
    """Return whether a name is that of state by the number of a parameter."""
    return numbered(name) is not None


def state_by_weight(
    state: Iterable[str], shapes: Mapping[str, Shape], of_model: Collection[str] | None = None
) -> dict[str, str]:
    """Return the name of the state that belongs to a weight, by the name of the weight, where that can be told.

    Args:
        state: names of one kind of state, such as `exp_avg_sq`; those without a number are left out.
        shapes: shapes of all tensors of the save, in the order of its state dict.
        of_model: names of parameters and buffers of models; None: names alone tell.

    Returns:
        Weights of two or more dimensions. Those that state of several optimizers fits have no entry; copies of a model,
        such as an average of its weights, have the same state.
    """
    optimizers: dict[str, dict[Shape, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for name in state:
        if (found := numbered(name)) is not None and len(shapes[name]) > 1:
            optimizers[found[0]][shapes[name]].append((found[1], name))
    if not optimizers:
        return {}
    models: dict[str, dict[Shape, list[str]]] = defaultdict(lambda: defaultdict(list))
    of_model = of_models(shapes, ()) if of_model is None else of_model
    for name, shape in shapes.items():
        if len(shape) > 1 and name in of_model:
            models[name.partition(".")[0]][shape].append(name)
    fitting: dict[str, set[str]] = defaultdict(set)
    for own_state in optimizers.values():
        for model in models.values():
            others = [shape for shape in model if len(model[shape]) != len(own_state.get(shape, ()))]
            for shape in model.keys() & own_state.keys():
                own = [name for _, name in sorted(own_state[shape])]
                if others == [shape] and (len(own), len(model[shape])) == (1, 2):
                    own *= 2  # all else is trained once, so that these are one parameter, a tied one
                if len(own) == len(model[shape]):
                    for weight, name in zip(model[shape], own, strict=True):
                        fitting[weight].add(name)
    return {weight: found.pop() for weight, found in fitting.items() if len(found) == 1}
