"""Kernels: all elementwise passes over the data.

This package exports the implementations for the CPU, of `cpu` (C or Numba), which say what each operation does. Tests
compare every implementation, bit for bit, with one in NumPy that is close to the formulas.
"""

from dsq_ckpt.kernels.compensation import compensate
from dsq_ckpt.kernels.cpu import (
    count_octaves,
    dequantize,
    dequantize_refined,
    from_bf16,
    gather_protected,
    joint_sketch,
    quantize,
    refine,
    sketch,
    to_bf16,
)
from dsq_ckpt.kernels.cpu_decode import find_positions, refined_value_table, value_table
from dsq_ckpt.kernels.cpu_pack import pack, unpack
from dsq_ckpt.kernels.importance import PROTECT, PRUNE, classify, compute_importance, importance_thresholds

__all__ = [
    "PROTECT",
    "PRUNE",
    "classify",
    "compensate",
    "compute_importance",
    "count_octaves",
    "dequantize",
    "dequantize_refined",
    "find_positions",
    "from_bf16",
    "gather_protected",
    "importance_thresholds",
    "joint_sketch",
    "pack",
    "quantize",
    "refine",
    "refined_value_table",
    "sketch",
    "to_bf16",
    "unpack",
    "value_table",
]
