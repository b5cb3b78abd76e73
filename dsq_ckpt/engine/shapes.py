"""Comparison of states by the names and shapes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.files import CheckpointFiles

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a state, of all ranks, by fully qualified name."""


def is_continuation(newer: Shapes, older: Shapes) -> bool:
    """Return whether a state is a later one of the training of an older checkpoint.

    It is if it has at least half of the older elements, or most of the older tensors, with the same names and shapes.
    So layers may be added, removed and changed, but a discriminator does not continue a generator, nor a part of a
    state the whole. Tensors are counted too, since one whose shape changes at every save, such as an encoded text, may
    have more elements than a small model.
    """
    if newer == older:
        return True
    if not older:
        return False
    equal = [name for name, shape in older.items() if newer.get(name) == shape]
    return 2 * count_shared_elements(newer, older) >= count_shared_elements(older, older) or 2 * len(equal) > len(older)


def count_shared_elements(one: Shapes, other: Shapes) -> int:
    """Return the number of elements in tensors that two states have with the same names and shapes; a scalar is one."""
    return sum(max(1, math.prod(shape)) for name, shape in one.items() if other.get(name) == shape)


def read_shapes(files: CheckpointFiles) -> Shapes:
    """Return the shapes of the tensors in an opened checkpoint.

    Raises:
        CorruptCheckpoint: its index is not as documented.
    """
    try:
        return {str(name): tuple(tensor["shape"]) for name, tensor in files.index["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{files.directory}': the index is not as documented ({error!r})") from error
