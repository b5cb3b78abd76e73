"""Lossless compression of numbers: bytes of equal significance are stored together and compressed by zstd.

Byte k of every item is plane k. This separates signs and exponents, which repeat, from the noise of the low bits.
zstd has one table of literals for 128 KiB, so planes only gain if each is compressed by itself:

* size < 4096 or itemsize 1: one zstd frame of the planes one after the other. Frames of their own would cost
  more.
* otherwise: itemsize - 1 lengths in bytes, uint64 little-endian, of the frames of all planes but the last;
  then one zstd frame for each plane, from plane 0.

Each frame declares the size of its contents.
"""

from __future__ import annotations

import numpy as np
import zstandard

from dsq_ckpt.core.arrays import U8
from dsq_ckpt.errors import CodingError

_MIN_SEPARATE_SIZE = 4096
_MAX_EXPANSION = 1 << 15  # zstd blocks have 4 bytes or more, and hold 128 KiB at most


def shuffle_compress(raw: bytes | memoryview, itemsize: int, level: int = 3) -> bytes:
    """Compress items of `itemsize` bytes, plane by plane.

    Raises:
        CodingError: the length of `raw` is not a multiple of `itemsize`.
    """
    data = np.frombuffer(raw, np.uint8)
    _check_itemsize(itemsize, data.size)
    # one compressor per call: they are not safe to share between threads
    compressor = zstandard.ZstdCompressor(level=level)
    planes = data.reshape(-1, itemsize).T
    if itemsize == 1 or data.size < _MIN_SEPARATE_SIZE:
        return compressor.compress(planes.tobytes())
    frames = [compressor.compress(plane.tobytes()) for plane in planes]
    lengths = np.array([len(frame) for frame in frames[:-1]], "<u8")
    return b"".join([lengths.tobytes(), *frames])


def shuffle_decompress(data: bytes | memoryview, itemsize: int, size: int) -> bytes:
    """Invert `shuffle_compress`; return exactly `size` bytes.

    Raises:
        CodingError: the frames are damaged, truncated, followed by other bytes, or hold another number of
        bytes.
    """
    _check_itemsize(itemsize, size)
    data = memoryview(data).cast("B")
    if size > len(data) * _MAX_EXPANSION:  # before memory is allocated
        raise CodingError(f"{len(data)} bytes of shuffled data cannot hold {size}")
    if itemsize == 1:
        return _decompress(data, size).tobytes()
    if size < _MIN_SEPARATE_SIZE:
        return _decompress(data, size).reshape(itemsize, -1).T.tobytes()
    header_size = 8 * (itemsize - 1)
    if len(data) < header_size:
        raise CodingError(f"{len(data)} bytes of shuffled data, expected at least {header_size}")
    ends = [header_size, *(int(length) for length in np.frombuffer(data[:header_size], "<u8")), len(data)]
    for plane in range(1, itemsize):
        ends[plane] += ends[plane - 1]
    items = np.empty((size // itemsize, itemsize), np.uint8)
    for plane in range(itemsize):
        items[:, plane] = _decompress(data[ends[plane] : ends[plane + 1]], size // itemsize)
    return items.tobytes()


def _decompress(frame: memoryview, size: int) -> U8:
    try:
        # The decompressor allocates what the frame declares, so the declaration is compared with `size`
        # first.
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != size:
            raise CodingError(f"a zstd frame declares {declared} bytes, expected {size}")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodingError(f"damaged zstd frame of {len(frame)} bytes: {error}") from error
    if len(content) != size:
        raise CodingError(f"a zstd frame holds {len(content)} bytes, expected {size}")
    return np.frombuffer(content, np.uint8)


def _check_itemsize(itemsize: int, size: int) -> None:
    if itemsize < 1 or size < 0 or size % itemsize:
        raise CodingError(f"{size} bytes are not a whole number of items of {itemsize} bytes")
