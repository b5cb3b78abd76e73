"""Peers that are packages: NNCodec and ZipNN in an environment of their own, zstd, and `dsq_ckpt` without loss."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from evaluation.peers.environment import Worker
from evaluation.peers.states import State


@dataclass
class NNCodec:
    """NNCodec on differences to its own last reconstruction; weights alone.

    Temporal context adaptation and dependent quantization are on, as its authors code updates of a model; the knob is
    the quantization parameter of matrices, from coarse to fine, vectors have the package's own.
    """

    worker: Worker
    name: str = "nncodec"
    knobs: tuple[int, ...] = tuple(range(-14, -48, -2))
    seconds: float = 0.0
    _directory: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def start(self) -> None:
        """Begin a chain."""
        self.worker(codec="nncodec", do="start")

    def accept(self) -> None:
        """Make what was decoded last what the next difference is from."""
        self.worker(codec="nncodec", do="accept")

    def encode(self, state: State, before: State, knob: int) -> bytes:
        """Return the bitstream of a difference."""
        source, target = self._files("difference.npz", "bitstream")
        arrays: dict[str, Any] = {name: (value - before.weights[name]).numpy() for name, value in state.weights.items()}
        np.savez(source, **arrays)
        self.seconds = self.worker(codec="nncodec", do="encode", source=str(source), target=str(target), qp=knob)
        return target.read_bytes()

    def decode(self, data: bytes, before: State) -> State:
        """Return the weights with the difference added."""
        source, target = self._files("bitstream", "made.npz")
        source.write_bytes(data)
        self.seconds = self.worker(codec="nncodec", do="decode", source=str(source), target=str(target))
        with np.load(target) as residuals:
            weights = {name: value + torch.from_numpy(residuals[name]) for name, value in before.weights.items()}
        return replace(before, weights=weights)

    def _files(self, *names: str) -> list[Path]:
        return [Path(self._directory.name) / name for name in names]


@dataclass
class Lossless:
    """A coder of bytes, on the tensors of a state one after the other, or on their XOR with the last state's."""

    name: str
    coder: Zstd | ZipNN
    difference: bool = False
    knobs: tuple[None, ...] = (None,)
    seconds: float = 0.0

    def encode(self, state: State, before: State, knob: None) -> bytes:
        """Return the compressed bytes."""
        data = _bytes(state)
        if self.difference:
            data = _xor(data, _bytes(before))
        stream, self.seconds = self.coder.compress(data, _dtype(state))
        return stream

    def decode(self, data: bytes, before: State) -> State:
        """Return the state that `encode` was given, bit for bit."""
        decoded, self.seconds = self.coder.decompress(data, _dtype(before))
        if self.difference:
            decoded = _xor(decoded, _bytes(before))
        parts, start = {}, 0
        for name, value in before.tensors().items():
            end = start + value.numel() * value.itemsize
            parts[name] = torch.frombuffer(bytearray(decoded[start:end]), dtype=value.dtype).view(value.shape)
            start = end
        return before.with_tensors(lambda name, _: parts[name])


@dataclass(frozen=True)
class Zstd:
    """zstd at a level."""

    level: int = 3

    def compress(self, data: bytes, dtype: str) -> tuple[bytes, float]:
        """Return the compressed bytes; 0 seconds stands for those of the call."""
        return zstandard.ZstdCompressor(level=self.level).compress(data), 0.0

    def decompress(self, data: bytes, dtype: str) -> tuple[bytes, float]:
        """Return the bytes."""
        return zstandard.ZstdDecompressor().decompress(data), 0.0


@dataclass
class ZipNN:
    """ZipNN, which splits numbers into bytes and Huffman-codes exponents, on one thread of its own process."""

    worker: Worker
    _directory: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def compress(self, data: bytes, dtype: str) -> tuple[bytes, float]:
        """Return the compressed bytes and the seconds in that process."""
        return self._do("encode", data, dtype)

    def decompress(self, data: bytes, dtype: str) -> tuple[bytes, float]:
        """Return the bytes and the seconds in that process."""
        return self._do("decode", data, dtype)

    def _do(self, what: str, data: bytes, dtype: str) -> tuple[bytes, float]:
        source, target = (Path(self._directory.name) / name for name in ("source", "target"))
        source.write_bytes(data)
        seconds = self.worker(codec="zipnn", do=what, source=str(source), target=str(target), dtype=dtype)
        return target.read_bytes(), seconds


def _bytes(state: State) -> bytes:
    return b"".join(_raw(tensor) for tensor in state.tensors().values())


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _xor(one: bytes, other: bytes) -> bytes:
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).tobytes()


def _dtype(state: State) -> str:
    return str(next(iter(state.weights.values())).dtype).removeprefix("torch.")


@dataclass
class Exact:
    """`dsq_ckpt` with the system `exact`, a keyframe each time or given the checkpoint before; files flushed."""

    name: str = "dsq, exact"
    deltas: bool = False
    knobs: tuple[None, ...] = (None,)
    seconds: float = 0.0
    _directory: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _history: dsq_ckpt.SaveHistory = field(default_factory=dsq_ckpt.SaveHistory)
    _count: int = 0

    def encode(self, state: State, before: State, knob: None) -> bytes:
        """Return the bytes of all files that a checkpoint adds."""
        self._count += 1
        started = time.perf_counter()
        dsq_ckpt.save(
            state.tensors(), self._path, config={"system": "exact", "storage": {"threads": 1}},
            parent="auto" if self.deltas else None, history=self._history,
        )
        self.seconds = time.perf_counter() - started
        own = [file.name for file in Manifest.read(self._path).files if file.role != "ancestor"]
        return b"".join((self._path / name).read_bytes() for name in sorted([*own, "manifest.json"]))

    def decode(self, data: bytes, before: State) -> State:
        """Return the state of the checkpoint that `encode` wrote last."""
        tensors = {name: torch.empty_like(value) for name, value in before.tensors().items()}
        started = time.perf_counter()
        dsq_ckpt.load(tensors, self._path, history=dsq_ckpt.SaveHistory())
        self.seconds = time.perf_counter() - started
        return before.with_tensors(lambda name, _: tensors[name])

    @property
    def _path(self) -> Path:
        return Path(self._directory.name) / f"{self._count:06d}"
