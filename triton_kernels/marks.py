"""Inside kernels: indices that come from data, made safe."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def checked(index, limit, fault):
    """``index``, not negative, below ``limit``; if any is not, ``fault`` is marked and the last entry taken instead."""
    mark_if(tl.max(index, 0) >= limit, fault)
    return tl.minimum(index, limit - 1)


@triton.jit
def mark_if(wrong, fault):
    """Mark ``fault`` if this tile holds something wrong; a mark stays."""
    tl.store(fault, 1, mask=wrong)
