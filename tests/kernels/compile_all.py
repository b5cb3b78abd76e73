"""Compile every kernel for an H100, which needs none, and print as JSON what is in the machine code's assembly.

The interpreter forgives what the compiler does not (and adds floats its own way): started by `test_compiled`.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dsq_ckpt import triton_kernels as kernels
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.triton_kernels import checks, compaction, launch
from tests.kernels.subjects import WINDOW

N = 1 << 14
assembly: dict[str, list[str]] = {}


class Driver:
    """What Triton asks of a GPU's driver before it compiles."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def compile_instead(kernel, *args, grid, warmup, **constants):
    compiled = run(kernel, *args, grid=grid, warmup=True, **constants)
    assembly.setdefault(kernel.__name__, []).append(compiled.asm["ptx"])


def work(dtype: torch.dtype, everything: bool) -> None:
    x, codes = torch.zeros(N, dtype=dtype), torch.zeros(N, dtype=torch.uint8)
    cells, levels = torch.zeros(256, dtype=torch.float64), torch.zeros(256)
    span, average = (WINDOW.lo, WINDOW.hi, 0.3), torch.zeros(N)
    table, joint = torch.zeros((64, WINDOW.size), dtype=torch.uint8), torch.zeros((8, WINDOW.size), dtype=torch.int64)
    tally = torch.zeros(launch.tile_count(N), dtype=torch.int32)
    refinement = kernels.Refinement(cells, cells, 4, everything, torch.zeros_like(codes))
    kernels.quantize(x, codes, 0, *span, table, codes, refinement, 9)
    kernels.joint_sketch(x, codes, 0, *span, joint)
    kernels.gather_protected(x, codes, 9, tally, bf16=everything, capacity=100)
    kernels.dequantize(codes, levels, 0.7, 9, levels, x)
    if not everything:
        return
    kernels.sketch(x[1:], *span, joint[0])
    kernels.sketch(x, FULL.lo, FULL.hi, 0.3, torch.zeros(FULL.size, dtype=torch.int64))  # the largest histogram
    kernels.joint_sketch(x, codes, 0, *span, torch.zeros((200, WINDOW.size), dtype=torch.int64))
    many = torch.zeros(N << 4)  # more than bins: counted into copies
    kernels.joint_sketch(
        many, torch.zeros(N << 4, dtype=torch.uint8), 0, *span, torch.zeros((60, WINDOW.size), dtype=torch.int64)
    )
    kernels.refine(x, codes, 0.3, cells, cells, 4, False, codes)
    kernels.dequantize_refined(codes, codes, 4, cells, cells, cells, levels, 0.7, -1, levels, False, x)
    kernels.blend(average, x, 0.9)
    kernels.sketch_sensitivity(x, average, torch.zeros(FULL.size, dtype=torch.int64), x, 0.9)
    kernels.classify(kernels.compute_importance(x, average), 0.1, 0.2)
    for bits in (3, 4):
        kernels.unpack(kernels.pack(codes, bits), bits, codes)
    kernels.apply_changes(codes, *kernels.find_changes(codes, codes, 100)[:2], codes)


triton.runtime.driver.set_active(Driver())
run, JITFunction.run = JITFunction.run, compile_instead
checks.INTERPRETED = True  # CPU tensors will do
launch.device_limits = lambda device: launch.DeviceLimits(132, 232448)
compaction.count_selected(torch.zeros(N, dtype=torch.uint8), None, 9)
work(torch.float32, True)
work(torch.bfloat16, False)
work(torch.float16, False)
json.dump(
    {
        name: {
            "fused": any(re.search(r"\bfma\.", text) for text in texts),
            "flushed": any(".ftz" in text for text in texts),
            "wide": any(re.search(r"ld\.global\S*\.v4\.b32", text) for text in texts),
        }
        for name, texts in assembly.items()
    },
    sys.stdout,
)
