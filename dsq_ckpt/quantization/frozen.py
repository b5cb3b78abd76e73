"""Frozen tensors of a model: parameters without a gradient and buffers, beside parameters that are trained.

No step of the optimizer repairs what a restore would change in them, so they are stored exactly. As they stay as they
are, this costs next to nothing after a keyframe. Those that do change, such as the weights of a teacher that averages
its student's, are told by their checksums: after two changes in a row they are stored like trained weights, until they
rest again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import NamedTuple

from torch import nn

from dsq_ckpt.core.unchanged import checksum
from dsq_ckpt.quantization.groups import FROZEN, QUANTIZABLE, layer_types, unwrapped

_CHANGES = 2


class _Look(NamedTuple):
    """A tensor at a save: its checksum, and how often in a row it had changed since the save before."""

    checksum: Hashable
    changes: int


_looks: weakref.WeakKeyDictionary[nn.Module, dict[str, _Look]] = weakref.WeakKeyDictionary()


def layer_types_now(model: nn.Module) -> dict[str, str]:
    """Return the layer types of a model that is about to be saved, those of frozen tensors after `FROZEN`.

    To be called once per save, since tensors are compared with what they held at the call before. Of a model without
    any gradient nothing is told to be frozen: it is not in training.

    Args:
        model: a module; checksums are of the parts of its tensors that lie on this rank.
    """
    types = layer_types(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return types
    before = _looks.get(model, {})
    looks: dict[str, _Look] = {}
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if tensor.requires_grad or tensor.dtype not in QUANTIZABLE:
            continue
        found, last = None if tensor.is_meta else checksum(tensor), before.get(name)
        changes = 0 if last is None or last.checksum == found else last.changes + 1
        looks[name] = _Look(found, changes)
        if changes < _CHANGES:
            key = unwrapped(name)
            types[key] = FROZEN + types.get(key, "other")
    _looks[model] = looks
    return types
