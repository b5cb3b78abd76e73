"""Validation of an index: its form, and that chunks cover their tensors."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dsq_ckpt.errors import CorruptCheckpoint

_MAX_ELEMENTS = 1 << 62  # elements of a tensor
_MAX_CUT_DIMS = 8  # dimensions that a tensor may be cut in
_SPARSE, _PLACES = 16, 1 << 16
_MAX_DEPTH = 1000


def check_index(index: Any, location: str, own_files: Collection[str]) -> None:
    """Raise CorruptCheckpoint for an index that is not as documented.

    Args:
        index: parsed index.
        location: its file, for errors.
        own_files: names of the base files that its save wrote.

    Raises:
        CorruptCheckpoint: names the tensor or key that is wrong, and how.
    """
    try:
        _check_files(index, own_files)
        count = len(index["files"])
        for fqn, tensor in index["tensors"].items():
            if not isinstance(tensor["dtype"], str):
                raise _Invalid(f"'{fqn}' is of dtype {tensor['dtype']!r}")
            _check_chunks(fqn, tensor["shape"], tensor["chunks"], count)
        for fqn, entry in index["objects"].items():
            _check_place(fqn, entry, count)
        for fqn, first in (index.get("tied") or {}).items():
            if fqn not in index["tensors"] or not isinstance(first, str):
                raise _Invalid(f"'{fqn}' is tied to {first!r}, and is no tensor of the checkpoint")
        _check_paths(index)
    except _Invalid as error:
        raise CorruptCheckpoint(f"{location} is not as documented: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{location} is not as documented: {error!r}") from error


def find_coverage_error(shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return why chunks do not cover each element of a tensor exactly once; None if they do.

    A box is identified by its signed corners, with alternating signs. The corners of the chunks sum to those of the
    tensor if and only if the chunks tile it, so the work is linear in the number of chunks.

    Args:
        shape: shape of the tensor.
        chunks: offsets and shape of each chunk.
    """
    dims, chunks = len(shape), list(chunks)
    if len(chunks) == 1 and list(chunks[0][1]) == list(shape) and not any(chunks[0][0]):
        return None  # as most are
    boxes = [
        (offsets, tuple(map(sum, zip(offsets, sizes, strict=True)))) for offsets, sizes in chunks if math.prod(sizes)
    ]
    missing = math.prod(shape) - sum(math.prod(b - a for a, b in zip(*box, strict=True)) for box in boxes)
    if missing:
        what = f"{missing} of {math.prod(shape)} elements are missing" if missing > 0 else f"{-missing} too many"
        return f"its chunks do not cover it: {what}"
    cut = [dim for dim in range(dims) if any(low[dim] != 0 or high[dim] != shape[dim] for low, high in boxes)]
    if len(cut) > _MAX_CUT_DIMS:
        return f"it is cut in {len(cut)} dimensions, expected {_MAX_CUT_DIMS} at most"
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    shape_boxes = [((0,) * dims, tuple(shape))] if boxes else []
    for weight, weighted_boxes in ((1, boxes), (-1, shape_boxes)):
        for low, high in weighted_boxes:
            for choice in itertools.product((0, 1), repeat=len(cut)):
                corner = tuple((high if up else low)[dim] for dim, up in zip(cut, choice, strict=True))
                corners[corner] += -weight if sum(choice) % 2 else weight
    return "its chunks overlap" if any(corners.values()) else None


class _Invalid(Exception):
    """Part of an index that is not as documented."""


def _check_files(index: Any, own_files: Collection[str]) -> None:
    if unknown := [name for name in index["files"] if name not in own_files]:
        raise _Invalid(f"it speaks of '{unknown[0]}', which the manifest does not name as a base file of this save")


def _check_chunks(fqn: str, shape: Any, chunks: Any, files: int) -> None:
    if not _is_number_list(shape) or math.prod(max(length, 1) for length in shape) > _MAX_ELEMENTS:
        raise _Invalid(f"'{fqn}' has the shape {str(shape)[:80]}")
    for offsets, sizes, *entry in chunks:
        if not (_is_number_list(offsets) and _is_number_list(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise _Invalid(f"'{fqn}' of shape {shape} has a chunk at {str(offsets)[:80]} of shape {str(sizes)[:80]}")
        _check_place(fqn, entry, files)
    if len(chunks) == 1 and chunks[0][1] == shape and not any(chunks[0][0]):
        return
    if (problem := find_coverage_error(shape, ((chunk[0], chunk[1]) for chunk in chunks))) is not None:
        raise _Invalid(f"'{fqn}': {problem}")


def _check_place(fqn: str, entry: Any, files: int) -> None:
    if not _is_number_list(entry) or len(entry) != 2 or entry[0] >= files:
        raise _Invalid(f"'{fqn}' lies in {str(entry)[:80]}, expected the number of one of {files} file(s) and a record")


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _MAX_ELEMENTS for number in value)


def _check_paths(index: Any) -> None:
    """Check that every tensor and object has a path, and that no path implies a list that is far too long."""
    paths = index["planner"]
    if paths is None or paths == {}:  # none are known
        return
    names = [*index["tensors"], *index["objects"]]
    if absent := [name for name in names if name not in paths]:
        raise _Invalid(f"{len(absent)} of {len(names)} names have no path in the state dict, among them '{absent[0]}'")
    empty = index.get("empty_dicts") or []
    for name, path in itertools.chain(paths.items(), (("an empty dict", path) for path in empty)):
        if not path and name in paths:
            raise _Invalid(f"an empty path for '{name}'")
        if len(path) > _MAX_DEPTH or not all(type(key) is str or (type(key) is int and key >= 0) for key in path):
            raise _Invalid(f"'{name}' has the path {str(path)[:80]}")
    names_by_path: dict[tuple[str | int, ...], str] = {}
    for name, path in paths.items():
        if (other := names_by_path.setdefault(tuple(path), name)) != name:
            raise _Invalid(f"'{name}' has the path of '{other}', {str(path)[:80]}")
    longest: dict[tuple[Any, ...], int] = {}
    for path in itertools.chain(paths.values(), empty):
        for position, key in enumerate(path):
            if type(key) is int:
                above = tuple(path[:position])
                longest[above] = max(longest.get(above, 0), key)
    # An entry without names, such as an empty list, may occupy a place.
    max_places = _PLACES + _SPARSE * (len(paths) + len(empty))
    if sum(longest.values()) > max_places:
        above, place = max(longest.items(), key=lambda pair: pair[1])
        raise _Invalid(f"place {place} of a list at {str(above)[:80]}, but there are only {len(names)} entries in all")
