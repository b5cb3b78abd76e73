"""Runs in the environment of peers: compresses and decompresses files as lines of JSON on its input ask for.

It imports nothing of this project, and its answers go to the output that it was started with; what packages print
goes to its errors.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class NNCodec:
    """Differences in, bitstream out. Contexts are those of the last update that was accepted (the coder's `tca`)."""

    def __init__(self) -> None:
        self.coder = importlib.import_module("nncodec.nn")
        self.base = self.pending = self._fresh()

    def _fresh(self) -> dict[str, Any]:
        return {"parameters": {}, "put_node_depth": {}, "device_id": 0, "parameter_id": {}}

    def start(self) -> None:
        """Begin a chain."""
        self.base = self.pending = self._fresh()

    def accept(self) -> None:
        """Take what was decoded last as what the next update follows."""
        self.base = self.pending

    def encode(self, source: str, target: str, qp: int) -> float:
        """Compress arrays of an .npz file."""
        with np.load(source) as arrays:
            values = dict(arrays)
        base = copy.deepcopy(self.base)
        started = time.perf_counter()
        data = self.coder.encode(
            values, {"qp": qp, "tca": True, "verbose": False, "results": os.path.dirname(target)}, incremental=True,
            approx_param_base=base,
        )
        seconds = time.perf_counter() - started
        Path(target).write_bytes(data)
        return seconds

    def decode(self, source: str, target: str) -> float:
        """Decompress into an .npz file."""
        data, self.pending = bytearray(Path(source).read_bytes()), copy.deepcopy(self.base)
        started = time.perf_counter()
        values = self.coder.decode(data, approx_param_base=self.pending)
        seconds = time.perf_counter() - started
        np.savez(target, **values)
        return seconds


class ZipNN:
    """Bytes of one dtype in, bytes out, on one thread."""

    def __init__(self) -> None:
        self.package = importlib.import_module("zipnn")

    def encode(self, source: str, target: str, dtype: str) -> float:
        """Compress a file."""
        data = bytearray(Path(source).read_bytes())
        started = time.perf_counter()
        output = self.package.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1).compress(data)
        seconds = time.perf_counter() - started
        Path(target).write_bytes(output)
        return seconds

    def decode(self, source: str, target: str, dtype: str) -> float:
        """Decompress a file."""
        data = Path(source).read_bytes()
        started = time.perf_counter()
        output = self.package.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1).decompress(data)
        seconds = time.perf_counter() - started
        Path(target).write_bytes(output)
        return seconds


CODECS: dict[str, Any] = {"nncodec": NNCodec, "zipnn": ZipNN}


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    codecs: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        codec, do = request.pop("codec"), request.pop("do")
        try:
            if codec not in codecs:
                codecs[codec] = CODECS[codec]()
            answer = {"seconds": getattr(codecs[codec], do)(**request) or 0.0}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
