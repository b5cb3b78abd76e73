"""LC-Checkpoint's Algorithm 1 in NumPy: what a chain of differences decodes to, written without the package.

One thing is ours: the smallest and the largest value of a bucket are known up to a bin of the sketch, 64 of which
make an octave; each stands for its bin's harmonic centre.
"""

from __future__ import annotations

import numpy as np
import torch

CONFIG = {
    "quantize": {
        "weights": {"codebook": {"fit": "exponent", "bits": 2}, "refinement_bits": 0}, "granularity": "tensor",
        **{kind: {"method": "exact"} for kind in ("exp_avg", "exp_avg_sq", "momentum")},
    },
    "delta": {"against": "values"}, "storage": {"fsync": False, "threads": 2, "block_elements": 2048},
}


def make_config(refinement_bits=0, **codebook):
    """The configuration with another codebook."""
    weights = {"codebook": codebook, "refinement_bits": refinement_bits}
    return {**CONFIG, "quantize": {**CONFIG["quantize"], "weights": weights}}


def bin_centres(values):
    """What each value's bin stands for."""
    bits = np.abs(values).view(np.uint32)
    low = (bits & ~np.uint32(0x1FFFF)).view(np.float32).astype(np.float64)
    high = low + np.exp2(np.floor(np.log2(low)) - 6)
    return np.sign(values) * 2 * low * high / (low + high)


def quantize(difference, bits):
    """The difference with its buckets replaced by their levels, the small ones by zero."""
    out = np.zeros_like(difference)
    normal = np.abs(difference) >= np.float32(2.0**-126)
    buckets = {}
    for sign in (1, -1):
        mine = normal & (np.sign(difference) == sign)
        exponents = np.floor(np.log2(np.abs(difference, dtype=np.float64), where=mine, out=np.zeros(difference.shape)))
        for exponent in np.unique(exponents[mine]):
            members = np.flatnonzero(mine & (exponents == exponent))
            buckets[exponent, len(members), sign] = members
    for key in sorted(buckets, reverse=True)[: 2**bits - 1]:
        middle = bin_centres(difference[buckets[key]])
        out[buckets[key]] = np.float32(middle.min() + (middle.max() - middle.min()) / 2)
    return out


def algorithm_1(states, bits=2):
    """Reconstructed states, float32, one per state; the first is exact."""
    known = states[0].detach().float().numpy().reshape(-1).copy()
    results = [known.copy()]
    for state in states[1:]:
        known = known + quantize(state.detach().float().numpy().reshape(-1) - known, bits)
        results.append(known.copy())
    return [torch.from_numpy(values).view(states[0].shape) for values in results]


def make_walk(*shape, steps, seed=0, scale=0.002, dtype=torch.float32):
    """States that drift, most elements into one direction."""
    g = torch.Generator().manual_seed(seed)
    state, drift = torch.randn(*shape, generator=g) * 0.02, torch.randn(*shape, generator=g).exp() * scale / 3
    states = []
    for _ in range(steps):
        states.append(state.to(dtype))
        state = state + drift + torch.randn(*shape, generator=g) * scale
    return states
