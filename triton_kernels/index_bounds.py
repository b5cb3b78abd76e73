"""Device functions that bound indices that come from data."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp_index(index, limit, fault):
    """Return `index`, not negative, clamped below `limit`; `fault` is marked if any was clamped."""
    mark_if(tl.max(index, 0) >= limit, fault)
    return tl.minimum(index, limit - 1)


@triton.jit
def mark_if(wrong, fault):
    """Mark `fault` if any element of this tile is wrong; a mark stays."""
    tl.store(fault, 1, mask=wrong)
