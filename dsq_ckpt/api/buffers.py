"""Buffers whose shapes a module takes from what it is given, such as the scales of observers of `torch.ao`.

A load goes into a module's own tensors, which have other shapes where the module is new. Such a buffer is loaded into a
tensor of the saved shape, and the module's `load_state_dict` decides, as with a file of `torch.save`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import nn

from dsq_ckpt.core.hints import OTHER_SHAPE
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.quantization.groups import unwrapped


def sized_by_load(module: nn.Module) -> set[str]:
    """Return the names of the buffers that go through code of a module's own when it is loaded, without wrappers."""
    own = {name for name, part in module.named_modules(remove_duplicate=False) if _has_own_code(part)}
    return {
        unwrapped(name) for name, _ in module.named_buffers(remove_duplicate=False)
        if any(name[:end] in own for end in (0, *(place for place, letter in enumerate(name) if letter == ".")))
    }


def take_saved_shapes(
    modules: Mapping[tuple[Any, ...], nn.Module], told: dict[Any, Any], nesting: Nesting, tensors: Mapping[str, Any]
) -> None:
    """Put tensors of the shapes that were saved in place of such buffers of other shapes; the modules stay as they are.

    Args:
        modules: modules whose state dicts are in a state dict, by the keys that lead there.
        told: that state dict.
        nesting: of the checkpoint.
        tensors: its index of tensors.
    """
    for keys, module in modules.items():
        names, own, above = sized_by_load(module), reduce(getitem, keys, told), tuple(map(str, keys))
        for fqn, path in nesting.items() if names and isinstance(own, MutableMapping) else ():
            name = path[-1]
            if fqn not in tensors or tuple(map(str, path[:-1])) != above or unwrapped(str(name)) not in names:
                continue
            value, shape = own.get(name), torch.Size(tensors[fqn]["shape"])
            if type(value) is torch.Tensor and value.shape != shape:
                own[name] = value.new_empty(shape)


@contextmanager
def refused_sizes(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a module that does not take the shape of a tensor say what it was loaded from, and what to do.

    Raises:
        LoadFailed: it does not.
    """
    try:
        yield
    except RuntimeError as error:
        if "size mismatch for " not in str(error):
            raise
        raise LoadFailed(f"'{path}': {' '.join(str(error).split()).rstrip('.')}: {OTHER_SHAPE}") from error


def _has_own_code(module: nn.Module) -> bool:
    kind = type(module)
    return bool(
        module._load_state_dict_pre_hooks
        or kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
    )
