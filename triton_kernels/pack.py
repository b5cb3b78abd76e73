"""Packing of codes or symbols into a stream of bits, and unpacking: the bytes of `dsq_ckpt.kernels.pack`.

Each byte is made from the symbols that overlap it, and each symbol from the two bytes that may hold it. Neighbours read
the same bytes, from the cache, and all writes are contiguous.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.checks import check_bits

from . import launch
from .checks import Faults, check_flat, check_tensor, collect_faults
from .index_bounds import mark_if


def _parts(n: int) -> list[launch.Part]:
    """Return the launches for n symbols, multiples of eight, so that they are whole bytes; bit counts fit 32 bits."""
    return launch.parts(n, max(launch.PIECE >> 3, launch.ALIGNED))


def pack(symbols: torch.Tensor, bits: int, faults: Faults | None = None) -> torch.Tensor:
    """Pack symbols below `2**bits` into a stream of bits, the lowest bit of the first symbol first.

    Args:
        symbols: uint8[n].
        bits: 1..8.
        faults: where symbols of more bits are marked.

    Returns:
        uint8[ceil(n * bits / 8)]; bits after the last symbol are zero.

    Raises:
        ValueError: `bits` is out of range, or `symbols` not as above; without `faults` also a symbol's value.
    """
    check_bits(bits)
    check_flat("symbols", symbols, torch.uint8)
    out = torch.empty((symbols.numel() * bits + 7) // 8, dtype=torch.uint8, device=symbols.device)
    # Bytes begin up to bits - gcd(bits, 8) bits into a symbol.
    overlaps = (bits - math.gcd(bits, 8) + 7) // bits + 1
    with collect_faults(faults, symbols.device) as collected:
        for part in _parts(symbols.numel()):
            stream = out[part.elements.start // 8 * bits :][: (part.n * bits + 7) // 8]
            programs = triton.cdiv(stream.numel(), launch.TILE)
            launch.launch(
                _pack, (programs,), symbols[part.elements], part.n, stream, stream.numel(), collected.flag("symbols"),
                BITS=bits, OVERLAPS=overlaps,
            )
    return out


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Invert `pack`: fill `out`, uint8[n], from uint8[ceil(n * bits / 8)].

    Raises:
        ValueError: `bits` is out of range, or a shape, dtype or device is wrong.
    """
    check_bits(bits)
    check_flat("out", out, torch.uint8)
    check_tensor("packed", packed, torch.uint8, ((out.numel() * bits + 7) // 8,), like=out)
    for part in _parts(out.numel()):
        stream = packed[part.elements.start // 8 * bits :][: (part.n * bits + 7) // 8]
        launch.launch(_unpack, (part.tiles,), stream, stream.numel(), out[part.elements], part.n, BITS=bits)


@triton.jit(do_not_specialize_on_alignment=["fault"])
def _pack(symbols, n, out, size, fault, BITS: tl.constexpr, OVERLAPS: tl.constexpr, TILE: tl.constexpr):
    byte = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = byte * 8 // BITS
    value = tl.zeros([TILE], tl.int32)
    seen = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(OVERLAPS):
        offsets = first + i
        symbol = tl.load(symbols + offsets, mask=(byte < size) & (offsets < n), other=0).to(tl.int32)
        seen |= symbol
        # Seven bits to the left, so that the shift of a symbol that began in the byte before is not negative.
        value |= (symbol & ((1 << BITS) - 1)) << (offsets * BITS - byte * 8 + 7)
    mark_if(tl.max(seen, 0) >= 1 << BITS, fault)
    tl.store(out + byte, (value >> 7).to(tl.uint8), mask=byte < size)


@triton.jit
def _unpack(packed, size, out, n, BITS: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bit = offsets * BITS
    byte = bit >> 3
    mask = offsets < n
    low = tl.load(packed + byte, mask=mask, other=0).to(tl.int32)
    high = tl.load(packed + byte + 1, mask=mask & (byte + 1 < size), other=0).to(tl.int32)
    symbol = ((low | (high << 8)) >> (bit & 7)) & ((1 << BITS) - 1)
    tl.store(out + offsets, symbol.to(tl.uint8), mask=mask)
