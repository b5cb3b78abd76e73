"""Passes over data in C: the 32-lane coder, codes, values; and the choice between these paths and the Numba path.

`setup.py` builds the C sources beside this file. They need no Python headers, so any C compiler can build them, one
library serves all versions of Python, and a fuzzer can be linked with the same files. Calls through `ctypes` release
the GIL.

Every path writes the same bytes. The environment variable DSQ_CODER forces one, by a name in `PATHS`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsq_ckpt.core.arrays import F32, F64, I16, I32, I64, U8, U16, U32, Array
from dsq_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

PATHS = ("numba", "c", "avx2", "avx512")
"""Names of the paths, from slow to fast."""
VARIABLE = "DSQ_CODER"

_INTERFACE = 7
"""Version of the interface of the functions called here."""

_P, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dsq_interface": (_I, []),
    "dsq_sources": (ctypes.c_char_p, []),
    "dsq_best_path": (_I, []),
    "dsq_decode": (_I, [_I, _P, _P, _P, _S, _P, _S, _P, _P, _S, _P, _S]),
    "dsq_takes_two": (_I, [_I]),
    "dsq_decode_two": (None, [_I, _P, _P]),
    "dsq_encode": (ctypes.c_int64, [_I, _P, _P, _P, _S, ctypes.c_uint, _P, _P, _S, _P, _S]),
    "dsq_decode_changes": (_I, [_I, _P, _P, _P, _S, _P, _S, _P, _S, _P, ctypes.c_uint, _P, _S, _P, _S]),
    "dsq_encode_changes": (
        ctypes.c_int64, [_I, _P, _P, _P, _S, ctypes.c_uint, _P, _S, _P, ctypes.c_uint, _P, _P, _S, _P, _S]
    ),
    "dsq_values": (ctypes.c_int64, [_I, _P, _S, ctypes.c_uint, _P, _S, _P, _S, _I, _I, _P, _I]),
    "dsq_unpack": (_I, [_I, _P, _S, ctypes.c_uint, _P, _S]),
    "dsq_quantize": (
        _I, [_I, _P, _S, ctypes.c_float, _I, _I, _P, _S, _P, _S, _P, ctypes.c_uint, _I, _P, _S, _P]
    ),
    "dsq_refine": (_I, [_I, _P, _S, ctypes.c_float, _P, ctypes.c_uint, _I, _P, _S, _P]),
    "dsq_pack": (_I, [_I, _P, _S, ctypes.c_uint, _P]),
    "dsq_count_bins": (_I, [_I, _P, _S, ctypes.c_float, _I, _I, _P, _S, _P]),
    "dsq_count_keys": (_I, [_I, _P, _S, ctypes.c_float, _I, _I, _P, _P]),
    "dsq_count_octaves": (None, [_P, _S, _P]),
    "dsq_count_pairs": (_I, [_I, _P, _P, _S, _S, ctypes.c_uint, _P, _P]),
    "dsq_find_positions": (ctypes.c_int64, [_I, _P, _S, _I, _P, _S]),
    "dsq_to_bf16": (_I, [_I, _P, _S, _P]),
    "dsq_from_bf16": (_I, [_I, _P, _S, _P]),
    "dsq_kmeans": (_I, [_I, _P, _P, _S, _S, _P, _P, _P]),
    "dsq_choose": (_I, [_P, _P, _S, _P, _P, _P, _S, _P, _P, _S, _P, _P, _S, _S, ctypes.c_double, _P]),
    "dsq_scale": (_I, [_I, _P, _S, _S, _S, _P, _S, _P, _S, _P]),
    "dsq_divide": (_I, [_I, _P, _S, _S, _S, _P, _S, _P, _S, _P, _P]),
    "dsq_over_roots": (_I, [_I, _P, _P, _S, ctypes.c_float, _P]),
    "dsq_times_roots": (_I, [_I, _P, _P, _S, ctypes.c_float]),
    "dsq_times_octaves": (_I, [_I, _P, _P, _S, _P]),
    "dsq_step_lengths": (_I, [_I, _P, _P, _S, _P, _S, _S, _I, _I, _P, _S, _P, _S, _P, _S]),
    "dsq_row_sums": (_I, [_I, _P, _S, _S, _I, _I, _P, _P, _P, _P]),
    "dsq_part_waves": (_I, [_P, _P, _S, ctypes.c_double, _P, _P, _S, _P, _S, _P, _P]),
    "dsq_fit": (None, [_P, _S, _S, _P, _P, _P, _P, _P]),
    "dsq_write_rows": (_S, [_P, _P, _P, _P, _S, _S, _P]),
    "dsq_read_rows": (_I, [_P, _S, _P, _P, _P, _P, _S, _S]),
}


def _hash_sources() -> str | None:
    """Return the hash of the C sources next to this file, as in setup.py; None if there are none."""
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None


def _is_cut_off(file: Path) -> bool:
    """Return whether a 64-bit ELF file ends before what is mapped of it: the process that loads it would be killed."""
    with file.open("rb") as stream:
        head = stream.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01" or head[54] != 56:  # segments of 56 bytes
            return False
        stream.seek(int.from_bytes(head[32:40], "little"))
        segments = stream.read(56 * int.from_bytes(head[56:58], "little"))
    rows = struct.iter_unpack("<2I6Q", segments[: len(segments) // 56 * 56])
    ends = (offset + size for kind, _, offset, _, _, size, *_ in rows if kind == 1)  # of what is mapped
    return max(ends, default=1 << 64) > file.stat().st_size


def _load_library(file: Path) -> Any:
    """Load a library; raise OSError or AttributeError if it is for another system, cut off, or from other sources."""
    if _is_cut_off(file):
        raise OSError("it is cut off")
    library = ctypes.CDLL(str(file))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.dsq_interface() != _INTERFACE or _hash_sources() not in (None, library.dsq_sources().decode()):
        raise OSError("it was built from other sources")
    return library


@cache
def library() -> Any:
    """Return the compiled library, or None if there is none that can be used; log if a library cannot be used."""
    problem = None
    for suffix in EXTENSION_SUFFIXES:
        file = Path(__file__).with_name(f"_compiled{suffix}")
        if file.exists():
            try:
                return _load_library(file)
            except (OSError, AttributeError) as error:
                problem = f"{file}: {error}"
    if problem is not None:
        logger.warning("Numba codes, more slowly: %s; `pip install -e .` builds the library anew", problem)
    return None


def available() -> tuple[str, ...]:
    """Return the names of the paths that work here, from slow to fast."""
    compiled = library()
    return PATHS[:1] if compiled is None else PATHS[: 2 + compiled.dsq_best_path()]


def _check_path(name: str) -> str:
    if name not in available():
        raise ConfigError(f"{VARIABLE} asks for the coder's path {name!r}, expected one of {list(available())} here")
    return name


def force(name: str | None) -> None:
    """Use a path from now on in this process; None: the path in DSQ_CODER, or the fastest.

    Raises:
        ConfigError: The path does not exist, or is not available here.
    """
    global _path
    _path = _check_path(name or os.environ.get(VARIABLE) or available()[-1])


def path() -> str:
    """Return the name of the path in use."""
    return _path


def path_index() -> int:
    """Return the index of the path in use, as `decode` and `encode` take it; -1 for Numba's."""
    return PATHS.index(_path) - 1


def address(array: Array | None) -> int | None:
    """Return the address of an array's first element, as C functions take it; None, a null pointer, for None."""
    if array is None:
        return None
    if array.size and array.flags.writeable:  # a fifth of the time of the other, and a small block takes ten of these
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return array.ctypes.data


def raise_error(error: int) -> None:
    """Raise an error that a C function returned, and that checks of its arguments should have found.

    Raises:
        ValueError: the error is not 0.
    """
    if error:
        raise ValueError(f"arguments of a kernel do not fit each other (error {error})")


class Tables:
    """Tables of a decoder. Their addresses are looked up once: nine look-ups take as long as decoding 10,000 codes."""

    def __init__(self, rows: U32, counts: U16, escaped: U8, entries: U32, *classes: U8) -> None:
        """Make tables; for lists of changes, `classes` are kinds and limits."""
        self._arrays: tuple[Array, ...] = (rows, counts, escaped, entries, *classes)
        self.arguments: tuple[int | None, ...] = (
            address(rows), address(counts), address(escaped), rows.size, address(entries), entries.size,
        )
        for array in classes:
            self.arguments += address(array), array.size

    def __reduce__(self) -> tuple[type[Tables], tuple[Array, ...]]:
        """Return the constructor and its arguments, so that a copy in any process looks up its own addresses."""
        return Tables, self._arrays


def decode(path: int, tables: Tables, parent: U8 | None, out: U8, block: U8) -> int:
    """Decode a block; see `dsq_decode` in lanes.c."""
    result: int = library().dsq_decode(
        path, *tables.arguments, address(parent), address(out), out.size, address(block), block.size
    )
    return result


class BlockArguments(NamedTuple):
    """Arguments of `decode` for one block."""

    tables: Tables
    parent: U8 | None
    out: U8
    block: U8


@cache
def supports_pairs(path: int) -> bool:
    """Return whether a path decodes two blocks faster in turns than one after the other."""
    return path >= 0 and bool(library().dsq_takes_two(path))


def decode_pair(path: int, *blocks: BlockArguments) -> list[int]:
    """Decode two blocks, and return the error of each; see `dsq_decode_two` in lanes.c."""
    arguments = (ctypes.c_size_t * 22)(*(
        value or 0 for block in blocks for value in (
            *block.tables.arguments, address(block.parent), address(block.out), block.out.size,
            address(block.block), block.block.size,
        )
    ))
    errors = (_I * 2)()
    library().dsq_decode_two(path, arguments, errors)
    return list(errors)


def encode(
    path: int, table: U32, escapes: U32, counts: U16, shift: int, parent: U8 | None, codes: U8, buffer: U8
) -> int:
    """Encode a block; see `dsq_encode` in lanes.c."""
    result: int = library().dsq_encode(
        path, address(table), address(escapes), address(counts), escapes.size, shift, address(parent),
        address(codes), codes.size, address(buffer), buffer.size,
    )
    return result


def decode_changes(path: int, tables: Tables, codes: U8, block: U8) -> int:
    """Decode a block in place of its previous codes; see `dsq_decode_changes` in changes.c."""
    result: int = library().dsq_decode_changes(
        path, *tables.arguments, address(codes), codes.size, address(block), block.size
    )
    return result


def encode_changes(
    path: int, table: U32, escapes: U32, counts: U16, shift: int, kinds: U8, limits: U8, parent: U8, codes: U8,
    buffer: U8,
) -> int:
    """Encode a block given previous codes; see `dsq_encode_changes` in changes.c."""
    result: int = library().dsq_encode_changes(
        path, address(table), address(escapes), address(counts), escapes.size, shift, address(kinds), kinds.size,
        address(limits), limits.size, address(parent), address(codes), codes.size, address(buffer), buffer.size,
    )
    return result


def look_up_values(
    path: int, table: F32, rows: int, bits: int, codes: U8, symbols: U8 | None, packed: bool, counted: int, out: F32,
    last: bool,
) -> int:
    """Look up the values of codes; see `dsq_values` in values.c."""
    result: int = library().dsq_values(
        path, address(table), rows, bits, address(codes), codes.size, address(symbols),
        0 if symbols is None else symbols.size, packed, counted, address(out), last,
    )
    return result


def unpack(path: int, packed: U8, bits: int, out: U8) -> bool:
    """Unpack symbols; see `dsq_unpack` in values.c."""
    error: int = library().dsq_unpack(path, address(packed), packed.size, bits, address(out), out.size)
    return error == 0


def quantize(
    path: int, x: F32, inv_scale: np.float32, lo: int, hi: int, table: U8, parent: U8 | None, row: int, codes: U8,
    bits: int, of_bits: bool, cells: F64 | None, n_cells: int, packed: U8,
) -> bool:
    """Set the codes of values and pack their refinement symbols; see `dsq_quantize` in quantize.c."""
    error: int = library().dsq_quantize(
        path, address(x), x.size, inv_scale, lo, hi, address(table), len(table), address(parent), row,
        address(codes), bits, of_bits, address(cells), n_cells, address(packed),
    )
    return error == 0


def scale(
    path: int, values: F32, start: int, columns: int, by_row: I16, by_column: I16, scales: F32
) -> int:
    """Multiply elements of a matrix by scales of rows and columns; see `dsq_scale` in scales.c."""
    result: int = library().dsq_scale(
        path, address(values), values.size, start, columns, address(by_row), by_row.size, address(by_column),
        by_column.size, address(scales),
    )
    return result


def fit(counts: I64, log2s: I64, freqs: I32, firsts: I32, escape_freqs: I32, bits: I32) -> None:
    """Fit a model; see `dsq_fit` in model.c."""
    library().dsq_fit(
        address(counts), *counts.shape, address(log2s), address(freqs), address(firsts), address(escape_freqs),
        address(bits),
    )


def write_rows(freqs: I32, firsts: I32, escape_freqs: I32, bits: I32, data: U8) -> int:
    """Write the rows of a model; see `dsq_write_rows` in model.c."""
    result: int = library().dsq_write_rows(
        address(freqs), address(firsts), address(escape_freqs), address(bits), *freqs.shape, address(data)
    )
    return result


def read_rows(data: U8, freqs: I32, firsts: I32, escape_freqs: I32, bits: I32) -> bool:
    """Read the rows of a model; see `dsq_read_rows` in model.c."""
    return bool(
        library().dsq_read_rows(
            address(data), data.size, address(freqs), address(firsts), address(escape_freqs), address(bits),
            *freqs.shape,
        )
    )


def _compute_log2() -> I64:
    """Return 0, then 2**24 log2 of 1 to 2**15, by squaring integers, so that all machines have the same numbers."""
    numbers = np.maximum(np.arange((1 << 15) + 1, dtype=np.int64), 1)
    result = np.searchsorted(np.int64(1) << np.arange(16, dtype=np.int64), numbers, side="right") - 1
    rest = (numbers << (31 - result)).astype(np.uint64)
    for _ in range(24):
        rest = rest * rest >> np.uint64(31)
        above = rest >> np.uint64(32)
        rest >>= above
        result = result << 1 | above.astype(np.int64)
    return result.astype(np.int64)


LOG2 = _compute_log2()
"""Logarithms of frequencies, for both fits."""

# Chosen at import, so that a wrong DSQ_CODER is its own error. During a load it would look like an error of the file.
_path = _check_path(os.environ.get(VARIABLE) or available()[-1])
