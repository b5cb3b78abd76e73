"""Update rules of optimizers, as far as the names of their state show them.

First moments are quantized for the updates of Adam, SGD and RMSprop. An optimizer that keeps other state beside them
(tensors, a projection as an object, or either in its groups) may divide them by it, or transform them to another basis.
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
"""State beside a first moment that is consistent with Adam's update, or with that of SGD and RMSprop."""
_OF_SGD = {"dampening", "centered"}
"""Settings in `param_groups` that identify SGD and RMSprop, and optimizers derived from them."""
_OF_LAPROP, _OF_ADOPT = "exp_avg_lr_1", "clip_exp"
"""State of LaProp, or a setting of its earlier versions, and a setting of timm's ADOPT; unique to these."""
_FINE = 0.0625
"""Error of momentum that may be the input of a matrix function: inverse root or sign enlarge its small parts."""
BETAS = "betas"
"""Setting in `param_groups` of decay rates: of first moments, and of second ones."""
_GROUPS = ".param_groups."
_SETTINGS = (
    bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)
_MOST, _DEEPEST = 1 << 10, 8
"""Entries of a list that are checked, from its beginning, and depth of nesting."""


def find_extra_state(names: Collection[str]) -> dict[str, set[str]]:
    """Return, for each first moment, the state beside it that the usual optimizers do not keep.

    Beside `exp_avg`, this is state other than Adam's, such as Adamax's `exp_inf`, a Hessian, or a basis: `exp_avg` may
    be divided by it, and not by `exp_avg_sq`. Beside `momentum_buffer`, it is state that neither SGD nor RMSprop keeps,
    such as the preconditioners of Shampoo. First moments without such state have no entry.

    Args:
        names: names of tensors, and of `find_optimizer_objects`; entries of `param_groups` count for all state of the
            optimizer.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in _USUAL:
            owners.setdefault(parent, []).append(leaf)
    extra: dict[str, set[str]] = {}
    for name in names if owners else ():
        if (setting := _parse_group_setting(name)) is not None:
            for owner in owners if setting[2] != "params" else ():
                if owner.startswith(_state_prefix(setting[0])):
                    for leaf in owners[owner]:
                        extra.setdefault(f"{owner}.{leaf}", set()).add(setting[2])
            continue
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if (owner := ".".join(parts[:depth])) in owners:
                for leaf in owners[owner]:
                    if parts[depth] != leaf and kind_of(name) != "weights" and not _USUAL[leaf].fullmatch(parts[depth]):
                        extra.setdefault(f"{owner}.{leaf}", set()).add(parts[depth])
                break
    return extra


def find_optimizer_objects(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of objects in optimizers that show another update rule than Adam's.

    These are neither tensors nor settings, such as a projection; or decay rates by which first moments last longer than
    second ones. First moments are restored in units of the roots of second moments, which are known by octave, and
    would be off by that for longer than second moments are.

    Args:
        objects: values that are not tensors, by fully qualified name; None if the value is not known.
    """
    return frozenset(
        name for name, value in objects.items()
        if (kind_of(name) != "weights" or _parse_group_setting(name) is not None)
        and (not _is_setting(value) or _do_first_moments_last(name, value))
    )


def _do_first_moments_last(name: str, value: Any) -> bool:
    """Return whether decay rates let first moments last longer than second ones."""
    setting = _parse_group_setting(name)
    if setting is None or setting[2] != BETAS or not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(isinstance(rate, int | float) for rate in value) and value[0] > value[1]


def _is_setting(value: Any, depth: int = 0) -> bool:
    """Return whether a value consists of numbers, text and names, which show no other update rule."""
    if isinstance(value, _SETTINGS):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return math.prod(value.shape) <= 1
    if depth == _DEEPEST:
        return False
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif is_dataclass(value):
        inner = (getattr(value, field.name, None) for field in fields(value))
    else:
        return False
    return all(_is_setting(inner_value, depth + 1) for inner_value in islice(inner, _MOST))


def _parse_group_setting(name: str) -> tuple[str, str, str] | None:
    """Return owner, group and setting in the name of an entry of `param_groups`; None for other names."""
    owner, separator, rest = f".{name}".rpartition(_GROUPS)
    if not separator:
        return None
    group, _, setting = rest.rpartition(".")
    first, _, inner = rest.partition(".")
    if first.isdecimal() and inner:  # as in `param_groups.0.basis.2`
        group, setting = first, inner.partition(".")[0]
    return owner, group, setting


def _state_prefix(owner: str) -> str:
    """Return the prefix of the state of an optimizer, by its owner from `_parse_group_setting`."""
    return f"{owner}.state."[1:]


def find_unknown_updates(names: Iterable[str]) -> frozenset[str]:
    """Return the state prefixes of optimizers whose settings are neither those of SGD nor of RMSprop, such as Muon's.

    Args:
        names: names of all that is saved, settings in `param_groups` included; optimizers without settings are omitted.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for name in names:
        if (group_setting := _parse_group_setting(name)) is not None:
            owner, group, setting = group_setting
            groups.setdefault((owner, group), set()).add(setting)
    return frozenset(_state_prefix(owner) for (owner, _), keys in groups.items() if keys.isdisjoint(_OF_SGD))


def find_prenormalized(names: Iterable[str]) -> frozenset[str]:
    """Return the state prefixes of optimizers that average already divided gradients: LaProp and ADOPT.

    Their update is `exp_avg` itself, though they keep the same state as Adam: `exp_avg_sq` divides later gradients.

    Args:
        names: names of all that is saved, with all settings of `param_groups`: ADOPT is recognized by one that is
            missing.
    """
    names_found, groups = set[str](), dict[tuple[str, str], set[str]]()
    for name in names:
        if (setting := _parse_group_setting(name)) is not None:
            groups.setdefault(setting[:2], set()).add(setting[2])
        elif name.endswith(f".{_OF_LAPROP}"):
            owner, state, _ = f".{name}".rpartition(".state.")
            names_found.add(_state_prefix(owner) if state else name.removesuffix(_OF_LAPROP))
    for (owner, _), keys in groups.items():
        official = {"decouple", "capturable"} <= keys and "amsgrad" not in keys  # ADOPT of the paper's authors
        if official or not keys.isdisjoint((_OF_LAPROP, _OF_ADOPT)):
            names_found.add(_state_prefix(owner))
    return frozenset(names_found)


def flatten_param_groups(owner: str, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in an optimizer's `param_groups`, by their names in a state dict."""
    return {
        f"{owner}.param_groups.{number}.{key}": value
        for number, group in enumerate(groups) for key, value in group.items()
    }


def with_finer_error(config: TensorConfig) -> TensorConfig:
    """Return the configuration of momentum whose update rule is unknown, from that of SGD's."""
    codebook = config.codebook
    if not isinstance(codebook, Relative) or codebook.error <= _FINE:
        return config
    return config.model_copy(update={"codebook": codebook.model_copy(update={"error": _FINE})})


def find_weight_bound_state(names: Collection[str]) -> frozenset[str]:
    """Return the names of state that is valid only for the exact weights at which it was computed.

    These are the last gradient in L-BFGS, whose difference to the next one is used, and the step sizes of Rprop, which
    have shrunk to the distance of the weights from their optimum.

    Args:
        names: names of all tensors of a save.
    """
    all_names, bound = frozenset(names), set[str]()
    for name in all_names:
        parent, _, leaf = name.rpartition(".")
        if leaf == "prev_flat_grad" or (leaf == "step_size" and f"{parent}.prev" in all_names):
            bound.add(name)
    return frozenset(bound)
