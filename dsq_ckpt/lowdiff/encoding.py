"""Lossless encoding of the gradient of one step.

Parameters of one dtype are concatenated in their order, and stored in one of four encodings:

* sparse: gaps between the indices of elements that may be non-zero, and their values.
* half: 16-bit floats and one factor, for gradients that were synchronized in 16 bits and then clipped.
* palette: codes of at most 256 levels, for gradients quantized by k-means.
* raw: the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from dsq_ckpt.coding import shuffle_compress, shuffle_decompress
from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.core.arrays import U8
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.kernels.scan import bitwise_equal
from dsq_ckpt.storage.record_fields import parse_dtype

_ESCAPE = 255
_SAMPLE = 4096
_NEIGHBORS = 3
"""Number of adjacent floats on each side of a candidate that are candidates too."""
_PROBE_ELEMENTS = 64
_HALVES = (torch.float16, torch.bfloat16)
_LEVEL = 1  # of zstd; the data is hardly compressible, so a higher level gains nothing

AddBlock = Callable[[bytes], int]
"""A function that stores a block of bytes and returns its number."""
GetBlock = Callable[[int], bytes]
"""A function that returns the bytes of a block."""


def encode_sparse(indices: torch.Tensor, values: torch.Tensor, add: AddBlock) -> dict[str, Any]:
    """Encode values at int64 indices, in any order; an index may repeat with the same value.

    Returns:
        Plain data for `decode_gradient`.
    """
    ordered, first = np.unique(indices.numpy(), return_index=True)
    gaps = np.diff(ordered, prepend=-1) - 1
    escapes = gaps // _ESCAPE
    stream = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, np.uint8)
    stream[np.arange(len(gaps)) + np.cumsum(escapes)] = gaps % _ESCAPE
    block = add(shuffle_compress(stream.tobytes(), 1, _LEVEL))
    return {
        "as": "sparse", "count": len(ordered), "gaps": [block, stream.size],
        "values": add(_pack(values[torch.from_numpy(first)])),
    }


def encode_dense(
    values: torch.Tensor, scales: Sequence[float], half: torch.dtype | None, levels: torch.Tensor | None,
    add: AddBlock, search: bool = False,
) -> dict[str, Any]:
    """Encode flat values in the smallest encoding that restores them bit for bit.

    Args:
        values: 1-D tensor of any dtype.
        scales: candidates of the factor by which 16-bit floats or levels were multiplied.
        half: 16-bit dtype of the values before multiplication; None if unknown.
        levels: float32[levels], candidate levels of the values before multiplication; None if unknown.
        add: function that stores a block.
        search: also search factors that the values themselves imply; see `scales_from_values`.
    """
    if values.dtype == torch.float32 and values.numel():
        for scale in scales if levels is not None else ():
            assert levels is not None
            encoded = _encode_palette(values, levels * torch.tensor(scale, dtype=torch.float32))
            if encoded is not None:
                codes, palette = encoded
                return {
                    "as": "palette", "levels": add(_pack(palette)), "count": palette.numel(),
                    "codes": add(shuffle_compress(codes.tobytes(), 1, 3)),
                }
        for dtype in _HALVES if half is None else (half,):
            for scale in chain(scales, scales_from_values(values, dtype) if search else ()):
                if (small := _encode_half(values, dtype, scale)) is not None:
                    return {
                        "as": "half", "stored": str(dtype).removeprefix("torch."), "scale": scale,
                        "values": add(_pack(small)),
                    }
    return {"as": "raw", "values": add(_pack(values))}


def decode_gradient(entry: Mapping[str, Any], out: torch.Tensor, get: GetBlock) -> None:
    """Decode the result of `encode_sparse` or `encode_dense` into `out`, a 1-D tensor of the encoded dtype.

    Raises:
        CodingError, CorruptCheckpoint: the blocks do not match the entry.
    """
    kind, elements = entry["as"], out.numel()
    if kind == "raw":
        out.copy_(_unpack(get(entry["values"]), out.dtype, elements))
    elif kind == "half":
        small = _unpack(get(entry["values"]), parse_dtype(entry["stored"]), elements)
        torch.mul(small.float(), torch.tensor(entry["scale"], dtype=torch.float32), out=out)
    elif kind == "palette":
        palette = _unpack(get(entry["levels"]), torch.float32, int(entry["count"]))
        codes = np.frombuffer(shuffle_decompress(get(entry["codes"]), 1, elements), np.uint8)
        if elements and int(codes.max()) >= palette.numel():
            raise CorruptCheckpoint(f"a gradient has level {int(codes.max())} of {palette.numel()}")
        out.copy_(torch.from_numpy(palette.numpy()[codes]))
    elif kind == "sparse":
        indices = decode_sparse_indices(entry, elements, get)
        out.zero_()
        out[indices] = _unpack(get(entry["values"]), out.dtype, indices.numel())
    else:
        raise CorruptCheckpoint(f"a gradient is stored as {kind!r}, which this version does not know")


def scales_from_probes(probes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return candidates of the factor by which gradients were multiplied after their synchronization, likeliest first.

    Args:
        probes: a few elements of each gradient before and after the multiplication, float32.
    """
    pairs = [(before.double(), after.double()) for before, after in probes]
    if not pairs:
        return [1.0]
    before, after = (torch.cat(side) for side in zip(*pairs, strict=True))
    usable = before.isfinite() & after.isfinite() & (before != 0)
    if torch.equal(before[usable], after[usable]) or not usable.any():
        return [1.0]
    before, after = before[usable], after[usable]
    largest = int(before.abs().argmax())
    ratio = np.float32(float(after[largest] / before[largest]))
    candidates = [ratio]
    for direction in (np.float32(np.inf), np.float32(-np.inf)):
        step = ratio
        for _ in range(4):
            step = np.nextafter(step, direction, dtype=np.float32)
            candidates.append(step)
    single = before.float()
    return [float(scale) for scale in candidates if torch.equal(single * torch.tensor(scale), after.float())]


def scales_from_values(values: torch.Tensor, dtype: torch.dtype) -> Iterator[float]:
    """Yield candidate factors f such that every value is f times a 16-bit float.

    The largest value is the factor times a significand of the dtype, up to a power of two. bfloat16 has 128
    significands, float16 has 1024. Each significand yields a candidate, exact up to the rounding of one product. A
    sample of the other values rejects wrong candidates.

    Args:
        values: float32[n].
        dtype: dtype of the 16-bit floats.
    """
    top = torch.stack(values.aminmax()).abs().max()
    if not top.isfinite() or top == 0:
        return
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    # Small numbers of float16 have fewer bits, so the largest value becomes as large as float16 allows.
    exponent = 0 if dtype == torch.bfloat16 else 15 - bits
    significands = torch.arange(2**bits, 2 ** (bits + 1), dtype=torch.float64) * 2.0**exponent
    candidates = (top.double() / significands).float()
    neighbors = torch.arange(-_NEIGHBORS, _NEIGHBORS + 1, dtype=torch.int32)
    candidates = (candidates.view(torch.int32)[:, None] + neighbors).view(-1)
    candidates = candidates.view(torch.float32)[:, None]
    sample = values[:: max(values.numel() // _SAMPLE, 1)]
    if int(sample.count_nonzero()) < _PROBE_ELEMENTS:
        sample = values
    sample = sample[sample != 0]
    sample = sample[:: max(sample.numel() // _PROBE_ELEMENTS, 1)]
    yield from candidates[((sample / candidates).to(dtype).float() * candidates == sample).all(1), 0].tolist()


def decode_sparse_indices(entry: Mapping[str, Any], elements: int, get: GetBlock) -> torch.Tensor:
    """Return the ascending int64 indices of a sparse encoding.

    Raises:
        CorruptCheckpoint: the indices do not match the number of elements.
    """
    block, size = entry["gaps"]
    stream = np.frombuffer(shuffle_decompress(get(block), 1, int(size)), np.uint8)
    ends = stream != _ESCAPE
    # Every byte advances the index; an escape does not end the gap.
    indices = np.cumsum(stream.astype(np.int64) + ends)[ends] - 1
    if len(indices) != int(entry["count"]) or (len(indices) and int(indices[-1]) >= elements):
        raise CorruptCheckpoint(f"{len(indices)} places of a gradient of {elements} elements do not fit")
    return torch.from_numpy(indices)


def _encode_palette(values: torch.Tensor, levels: torch.Tensor) -> tuple[U8, torch.Tensor] | None:
    """Return codes, uint8[n], and their palette, or None if `values` are not all in `levels`."""
    palette = torch.unique(levels)
    if palette.numel() > 256:
        return None
    for part in (values[:: max(values.numel() // _SAMPLE, 1)].contiguous(), values):
        codes = torch.searchsorted(palette, part).clamp_(max=palette.numel() - 1)
        if not bitwise_equal(palette[codes], part):
            return None
    return codes.to(torch.uint8).numpy(), palette


def _encode_half(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor | None:
    """Return 16-bit floats whose products with `scale` are exactly `values`, or None if they do not exist."""
    if scale == 0:
        return None
    factor = torch.tensor(scale, dtype=torch.float32)
    for part in (values[:: max(values.numel() // _SAMPLE, 1)].contiguous(), values):
        small = (part / factor).to(dtype)
        if not bitwise_equal(small.float() * factor, part):
            return None
    return small


def _pack(values: torch.Tensor) -> bytes:
    raw = flat_bytes(values.contiguous()).numpy().tobytes() if values.numel() else b""
    return shuffle_compress(raw, values.element_size(), _LEVEL)


def _unpack(data: bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = shuffle_decompress(data, dtype.itemsize, count * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
