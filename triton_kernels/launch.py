"""Division of tensors into launches and tiles, and numbers of programs.

Offsets inside a kernel are 32 bits wide: longer tensors are processed in pieces. A piece is a multiple of 16
elements, so that the compiler sees masks that are uniform over 16 elements and loads 16 bytes at once; the rest,
of fewer than 16 elements, is a separate launch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, NamedTuple

import torch
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted on the CPU (TRITON_INTERPRET=1 when triton was imported)."""
TILE = 1 << 14 if INTERPRETED else 1 << 12
"""Elements that one program processes together; more when interpreted, where each operation has a fixed cost."""
PIECE = 1 << 30
"""Elements of one launch at most. A multiple of `ALIGNED`; with it a 32-bit count of elements cannot overflow."""
ALIGNED = 16
_PER_THREAD = 16  # elements of a tile per thread: 64 bytes of fp32, four loads


class Part(NamedTuple):
    """Elements of one launch."""

    elements: slice
    """Slice of the flat tensors."""
    first_tile: int
    """Number of tiles of the launches before this one."""
    tiles: int

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(self.elements.stop - self.elements.start)


def parts(n: int, max_elements: int | None = None) -> list[Part]:
    """Return the launches for `n` elements in order, each of at most `max_elements` (default: `PIECE`)."""
    max_elements = max_elements or PIECE
    whole = n - n % ALIGNED
    slices = [slice(start, min(start + max_elements, whole)) for start in range(0, whole, max_elements)]
    if whole < n:
        slices.append(slice(whole, n))
    launches, first_tile = [], 0
    for elements in slices:
        tiles = triton.cdiv(elements.stop - elements.start, TILE)
        launches.append(Part(elements, first_tile, tiles))
        first_tile += tiles
    return launches


def tile_count(n: int) -> int:
    """Return the number of tiles of all launches for `n` elements."""
    return sum(part.tiles for part in parts(n))


def slice_elements(tensor: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """Return a launch's slice of a flat tensor that has one entry per element; None for None."""
    return None if tensor is None else tensor[part.elements]


def slice_tiles(tensor: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """Return a launch's slice of a tensor that has one entry per tile; None for None."""
    return None if tensor is None else tensor[part.first_tile : part.first_tile + part.tiles]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, tile: int = 0, **constants: Any) -> None:
    """Queue a kernel on the current stream of the device of its first argument.

    Multiplications and additions are not fused: results are those of the CPU, bit for bit.

    Args:
        grid: programs, up to three axes.
        args: arguments of the kernel, the first one a tensor.
        tile: constant `TILE` of the kernel. Default: `launch.TILE`.
        constants: other compile-time constants of the kernel.
    """
    tile = tile or TILE
    warps = min(max(tile // (32 * _PER_THREAD), 1), 32)
    with _use_device(args[0].device):
        kernel[grid](*args, TILE=tile, **constants, num_warps=warps, enable_fp_fusion=False)


def _use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else _interpreter_lock


_interpreter_lock = threading.RLock()  # the interpreter patches Triton's modules while a kernel runs


class DeviceLimits(NamedTuple):
    """Limits of a device for persistent programs."""

    processors: int
    shared: int
    """Bytes of shared memory available to one program."""


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a CUDA device as reported by its driver; for the interpreter, those of a small device."""
    if device.type != "cuda":
        return DeviceLimits(2, 1 << 17)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return DeviceLimits(properties.multi_processor_count, shared)

