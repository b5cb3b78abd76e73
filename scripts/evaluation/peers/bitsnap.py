"""BitSnap's bitmask (Peng et al., "BitSnap: Checkpoint Sparsification and Quantization in LLM Training", 2511.12376).

Lossless differences of 16-bit weights: one bit per element tells whether it changed, and changed ones follow as they
are. The paper's other half, clusters for the optimizer's state, is lossy and not here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evaluation.peers.states import State


@dataclass(frozen=True)
class BitSnap:
    """The peer, for states of bfloat16 weights."""

    name: str = "bitsnap"
    knobs: tuple[None, ...] = (None,)

    def encode(self, state: State, before: State, knob: None) -> bytes:
        """Return mask and changed values of every tensor; a tensor that this makes larger is kept as it is."""
        streams = []
        for name, value in state.weights.items():
            now, then = _bits(value), _bits(before.weights[name])
            changed = now != then
            stream = np.packbits(changed).tobytes() + now[changed].tobytes()
            sparse = len(stream) < now.nbytes
            streams.append(struct.pack("<?", sparse) + (stream if sparse else now.tobytes()))
        return struct.pack(f"<{len(streams)}I", *map(len, streams)) + b"".join(streams)

    def decode(self, data: bytes, before: State) -> State:
        """Return the state that `encode` was given, bit for bit."""
        count = len(before.weights)
        start = 4 * count
        weights = {}
        lengths = struct.unpack_from(f"<{count}I", data)
        for (name, value), length in zip(before.weights.items(), lengths, strict=True):
            stream, start = data[start : start + length], start + length
            bits = _bits(value).copy()
            mask = -(-bits.size // 8)
            if stream[0]:
                changed = np.unpackbits(np.frombuffer(stream, np.uint8, mask, 1), count=bits.size).astype(bool)
                bits[changed] = np.frombuffer(stream, np.int16, offset=1 + mask)
            else:
                bits[:] = np.frombuffer(stream, np.int16, offset=1)
            weights[name] = torch.from_numpy(bits).view(torch.bfloat16).view(value.shape)
        return replace(before, weights=weights)


def _bits(value: Tensor) -> np.ndarray:
    bits: np.ndarray = value.flatten().view(torch.int16).numpy()
    return bits
