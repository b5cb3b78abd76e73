"""Which update an optimizer makes, as far as what it keeps tells of it.

First moments are quantized for the updates of Adam, SGD and RMSprop. An optimizer that keeps other state beside them, a
tensor, a projection as an object, or either in its groups, may divide them by that, or turn them into another basis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch

from dsq_ckpt.codebooks.update import Relative
from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.quantization.groups import kind_of

_USUAL = {
    "exp_avg": re.compile(r"step|mu_product|(max_)?exp_avg(_sq|_slow)?|momentum_buffer|z|(master|fp32).*"),
    "momentum_buffer": re.compile(r"step|square_avg|grad_avg|(master|fp32).*"),
}
"""State beside a first moment that does not tell of another update than Adam's, or than that of SGD and RMSprop."""
_OF_SGD = {"dampening", "centered"}
"""Settings in `param_groups` by which SGD and RMSprop, and those made after them, are known."""
_OF_LAPROP, _OF_ADOPT = "exp_avg_lr_1", "clip_exp"
"""State of LaProp, or a setting of its earlier versions, and a setting of timm's ADOPT, which no other has."""
_FINE = 0.0625
"""Error of momentum that a matrix function may be taken of: root of the inverse, or sign, enlarge its small parts."""
_GROUPS = ".param_groups."
_SETTINGS = (
    bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)
_MOST, _DEEPEST = 1 << 10, 8
"""Entries of a list that are looked at, from its beginning, and depth of nesting."""


def beside_first_moments(names: Collection[str]) -> dict[str, set[str]]:
    """Return the state that an optimizer keeps beside a first moment and that is none of Adam's, by the moment's name.

    Such as Adamax's `exp_inf`, a Hessian, or a basis: `exp_avg` may be divided by it, and not by `exp_avg_sq`. Beside
    `momentum_buffer` it is what neither SGD nor RMSprop has, such as the preconditioners of Shampoo. First moments
    without such state have no entry.

    Args:
        names: of tensors, and of `objects_of_optimizers`; what is in `param_groups` is beside all of the optimizer's.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in _USUAL:
            owners.setdefault(parent, []).append(leaf)
    found: dict[str, set[str]] = {}
    for name in names if owners else ():
        if (place := _place_in_groups(name)) is not None:
            for owner in owners if place[2] != "params" else ():
                if owner.startswith(_state_of(place[0])):
                    for leaf in owners[owner]:
                        found.setdefault(f"{owner}.{leaf}", set()).add(place[2])
            continue
        parts = name.split(".")
        for deep in range(len(parts) - 1, 0, -1):
            if (owner := ".".join(parts[:deep])) in owners:
                for leaf in owners[owner]:
                    if parts[deep] != leaf and kind_of(name) != "weights" and not _USUAL[leaf].fullmatch(parts[deep]):
                        found.setdefault(f"{owner}.{leaf}", set()).add(parts[deep])
                break
    return found


def objects_of_optimizers(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of what optimizers keep that is no tensor, and more than a setting, such as a projection.

    Args:
        objects: what is no tensor, by fully qualified name; None where the value is not known.
    """
    return frozenset(
        name for name, value in objects.items()
        if (kind_of(name) != "weights" or _place_in_groups(name) is not None) and not _is_setting(value)
    )


def _is_setting(value: Any, deep: int = 0) -> bool:
    """Return whether a value consists of numbers, text and names, which do not tell of another update."""
    if isinstance(value, _SETTINGS):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return math.prod(value.shape) <= 1
    if deep == _DEEPEST:
        return False
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif is_dataclass(value):
        inner = (getattr(value, field.name, None) for field in fields(value))
    else:
        return False
    return all(_is_setting(one, deep + 1) for one in islice(inner, _MOST))


def _place_in_groups(name: str) -> tuple[str, str, str] | None:
    """Return owner, group and setting of what is in the `param_groups` of an optimizer; None for other names."""
    owner, found, rest = f".{name}".rpartition(_GROUPS)
    if not found:
        return None
    group, _, setting = rest.rpartition(".")
    first, _, inner = rest.partition(".")
    if first.isdecimal() and inner:  # as in `param_groups.0.basis.2`
        group, setting = first, inner.partition(".")[0]
    return owner, group, setting


def _state_of(owner: str) -> str:
    """Return the prefix of the state of an optimizer, by what `_place_in_groups` gives."""
    return f"{owner}.state."[1:]


def with_other_updates(names: Iterable[str]) -> frozenset[str]:
    """Return the optimizers whose settings are neither those of SGD nor of RMSprop, as of Muon, by the state's prefix.

    Args:
        names: of all that is saved, settings in `param_groups` included; optimizers without these are not known.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for name in names:
        if (place := _place_in_groups(name)) is not None:
            owner, group, setting = place
            groups.setdefault((owner, group), set()).add(setting)
    return frozenset(_state_of(owner) for (owner, _), own in groups.items() if own.isdisjoint(_OF_SGD))


def divided_before(names: Iterable[str]) -> frozenset[str]:
    """Return the optimizers that average gradients divided already, by the state's prefix: LaProp and ADOPT.

    Their update is `exp_avg` itself, though they keep what Adam does: `exp_avg_sq` divides gradients to come.

    Args:
        names: of all that is saved, with all settings of each of the `param_groups`: ADOPT is known by one it lacks.
    """
    found, groups = set[str](), dict[tuple[str, str], set[str]]()
    for name in names:
        if (place := _place_in_groups(name)) is not None:
            groups.setdefault(place[:2], set()).add(place[2])
        elif name.endswith(f".{_OF_LAPROP}"):
            owner, state, _ = f".{name}".rpartition(".state.")
            found.add(_state_of(owner) if state else name.removesuffix(_OF_LAPROP))
    for (owner, _), own in groups.items():
        official = {"decouple", "capturable"} <= own and "amsgrad" not in own  # ADOPT of the paper's authors
        if official or not own.isdisjoint((_OF_LAPROP, _OF_ADOPT)):
            found.add(_state_of(owner))
    return frozenset(found)


def settings_of(owner: str, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of an optimizer's `param_groups`, by the names that they have in a state dict."""
    return {
        f"{owner}.param_groups.{number}.{key}": value
        for number, group in enumerate(groups) for key, value in group.items()
    }


def finer(config: TensorConfig) -> TensorConfig:
    """Return the settings of momentum whose update is not known, from those of SGD's."""
    codebook = config.codebook
    if not isinstance(codebook, Relative) or codebook.error <= _FINE:
        return config
    return config.model_copy(update={"codebook": codebook.model_copy(update={"error": _FINE})})


def fitted_to_weights(names: Collection[str]) -> frozenset[str]:
    """Return state that is of use at the very weights that it was made at, of all tensors of a save.

    Such are the last gradient that L-BFGS keeps, of which the next step takes the difference, and the step sizes of
    Rprop, which have shrunk to the distance of its weights from the best ones.
    """
    known, found = frozenset(names), set[str]()
    for name in known:
        parent, _, leaf = name.rpartition(".")
        if leaf == "prev_flat_grad" or (leaf == "step_size" and f"{parent}.prev" in known):
            found.add(name)
    return frozenset(found)
