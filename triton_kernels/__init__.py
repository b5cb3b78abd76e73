"""Triton implementations of the kernels, for data on a GPU.

Each operation has the name, the argument order and, bit for bit, the result that it has in `dsq_ckpt.kernels`, on
flat contiguous CUDA tensors instead of arrays; elements may also be bfloat16 or float16. This package imports Triton;
`dsq_ckpt.kernels.dispatch` imports it for the first CUDA tensor.

==================  =======================================================================
`sketch`          histograms of keys, alone or with previous codes
`quantize`        codes, and in the same pass refinement symbols
`protected`       gathering of protected values in order, and the inverse
`dequantize`      codes, refinement symbols and protected values to values
`pack`            streams of 1 to 8 bits per symbol
`changed_codes`   only the codes that have changed, and the inverse
`sensitivity`     averages of gradients, and the sketch of sensitivities in the same pass
`importance`      sensitivity of each element, and its class
==================  =======================================================================

There are no kernels for uniform, exponent-bucket, k-means or other codebooks: each of them is a table from keys to
codes, and `quantize` is one lookup per element for any table.

Kernels can also be interpreted on CPU tensors (TRITON_INTERPRET=1 before Triton is imported): slow, for tests.
"""

from dsq_ckpt.kernels.backend import Refinement
from dsq_ckpt.kernels.importance import PROTECT, PRUNE

from .changed_codes import apply_changes, find_changes
from .checks import Faults
from .dequantize import dequantize, dequantize_refined
from .importance import classify, compute_importance
from .pack import pack, unpack
from .protected import gather_protected
from .quantize import quantize, refine
from .sensitivity import blend, sketch_sensitivity
from .sketch import joint_sketch, sketch

__all__ = [
    "PROTECT",
    "PRUNE",
    "Faults",
    "Refinement",
    "apply_changes",
    "blend",
    "classify",
    "compute_importance",
    "dequantize",
    "dequantize_refined",
    "find_changes",
    "gather_protected",
    "joint_sketch",
    "pack",
    "quantize",
    "refine",
    "sketch",
    "sketch_sensitivity",
    "unpack",
]
