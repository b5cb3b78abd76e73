"""The kernels of this package as `dsq_ckpt.kernels.backend.Backend`."""

from __future__ import annotations

from functools import partial

import torch

from . import sensitivity as _sensitivity
from .changed_codes import apply_changes, find_changes
from .checks import Faults
from .dequantize import dequantize, dequantize_refined
from .importance import classify, compute_importance
from .pack import pack, unpack
from .protected import gather_protected
from .quantize import quantize, refine
from .sketch import joint_sketch, sketch


class TritonBackend:
    """Triton kernels on the tensors of a device, queued on the current stream.

    Values past the end of a table are reported by `check`.

    Args:
        device: device of all tensors; a CUDA device, or the CPU if kernels are interpreted.
    """

    name = "triton"

    classify = staticmethod(classify)
    gather_protected = staticmethod(gather_protected)
    compute_importance = staticmethod(compute_importance)
    find_changes = staticmethod(find_changes)
    sketch = staticmethod(sketch)
    unpack = staticmethod(unpack)
    blend = staticmethod(_sensitivity.blend)
    sketch_sensitivity = staticmethod(_sensitivity.sketch_sensitivity)

    def __init__(self, device: torch.device) -> None:
        faults = Faults(device)
        self.check = faults.check
        self.dequantize = partial(dequantize, faults=faults)
        self.dequantize_refined = partial(dequantize_refined, faults=faults)
        self.joint_sketch = partial(joint_sketch, faults=faults)
        self.pack = partial(pack, faults=faults)
        self.quantize = partial(quantize, faults=faults)
        self.refine = partial(refine, faults=faults)
        self.apply_changes = partial(apply_changes, faults=faults)
