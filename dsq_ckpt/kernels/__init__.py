"""Kernels: all elementwise passes over the data.

Each operation exists under one name in ``reference`` (NumPy, close to the formula) and in ``cpu`` (Numba), with one
signature and bit-identical results.  This package exports the implementations for the CPU.
"""

from dsq_ckpt.kernels.compensation import compensate
from dsq_ckpt.kernels.cpu import (
    dequantize,
    dequantize_refined,
    from_bf16,
    gather_protected,
    joint_sketch,
    octaves,
    quantize,
    refine,
    sketch,
    to_bf16,
)
from dsq_ckpt.kernels.cpu_decode import positions_of, refined_table, table_of
from dsq_ckpt.kernels.cpu_pack import pack, unpack
from dsq_ckpt.kernels.importance import PROTECT, PRUNE, classes, importance, thresholds

__all__ = [
    "PROTECT",
    "PRUNE",
    "classes",
    "compensate",
    "dequantize",
    "dequantize_refined",
    "from_bf16",
    "gather_protected",
    "importance",
    "joint_sketch",
    "octaves",
    "pack",
    "positions_of",
    "quantize",
    "refine",
    "refined_table",
    "sketch",
    "table_of",
    "thresholds",
    "to_bf16",
    "unpack",
]
