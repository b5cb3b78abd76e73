"""Whether two checkpoints are of one training, as far as the names and shapes of their tensors tell."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.files import CheckpointFiles

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a state, of all ranks, by fully qualified name."""


def continues(newer: Shapes, older: Shapes) -> bool:
    """Return whether a state is a later one of the training that an older checkpoint is of.

    It is if at least half of the older one's elements, or most of its tensors, are there, by the same names and in the
    same shapes: layers may come, go and change, but neither the discriminator in place of the generator, nor a part of
    a state in place of the whole, makes what was saved before superfluous. Tensors count too, since one whose shape
    changes at every save, such as an encoded text, may have more elements than a small model.
    """
    if not older:
        return not newer
    same = [name for name, shape in older.items() if newer.get(name) == shape]
    return 2 * shared(newer, older) >= shared(older, older) or 2 * len(same) > len(older)


def shared(one: Shapes, other: Shapes) -> int:
    """Return how many elements two states have in tensors of the same names and shapes; a scalar counts as one."""
    return sum(max(1, math.prod(shape)) for name, shape in one.items() if other.get(name) == shape)


def shapes_of(files: CheckpointFiles) -> Shapes:
    """Return the shapes of the tensors in an opened checkpoint.

    Raises:
        CorruptCheckpoint: its index is not as documented.
    """
    try:
        return {str(name): tuple(tensor["shape"]) for name, tensor in files.index["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{files.directory}': the index is not as documented ({error!r})") from error
