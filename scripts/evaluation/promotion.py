"""What LC-Checkpoint's stages are worth, and its buckets: figures 2, 4 and 5 of Chen et al., ICML 2020.

A difference is that of a state to the last reconstructed one. Stages, in bits per value: exponent-based quantization
needs log2(k) for the index of one of k buckets; x-bit priority promotion x; Huffman coding what the files hold.
A bucket has one sign and one exponent, floor(log2 |x|), and zero is a bucket of its own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import dsq_ckpt
from dsq_ckpt.codebooks.exponent import exponent_buckets
from dsq_ckpt.core.arrays import F32, I64, Mask
from dsq_ckpt.quantization.groups import assign, layer_types
from dsq_ckpt.storage.manifest import Manifest
from evaluation.recording import one_thread
from evaluation.report import Column, Row, digits, percent
from evaluation.rework import FP32, SPAN, Experiment, Method, Probe, checkpoints

STRIDE, SPANS = 10, range(1, 7)
"""Figure 5: a difference is that of 10 n iterations."""
PROMOTED = (2, 3, 4)
ZERO = -(2**30)
"""Stands for the exponent of zero, below all others."""


class Buckets(NamedTuple):
    """The buckets of a difference that hold values, as priority promotion orders them: zero is the last one.

    Attributes:
        exponents: int64[k]; that of zero is not one.
        signs: int64[k], 0 for zero.
        counts: int64[k].
        members: int64[n], the bucket of every value.
    """

    exponents: I64
    signs: I64
    counts: I64
    members: I64


def buckets_of(values: F32) -> Buckets:
    """Put values into buckets: by exponent, then by number, then the positive first, as `exponent_buckets` does."""
    keys = np.stack([_exponents(values), np.sign(values).astype(np.int64)])
    (exponents, signs), members, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    order = np.lexsort((-signs, -counts, -exponents))
    return Buckets(exponents[order], signs[order], counts[order], np.argsort(order)[members.reshape(-1)])


def _exponents(values: F32) -> I64:
    """Return floor(log2 |x|), ZERO for zero."""
    return np.where(values == 0, ZERO, np.frexp(values)[1] - 1).astype(np.int64)


def stages(plan: Experiment, bits: int, samples: int) -> Row:
    """Measure the size of each stage, mean over checkpoints, and in the last one exponents of the last convolution.

    Args:
        plan: The run and its checkpoints.
        bits: Of priority promotion.
        samples: Checkpoints to measure, spread over the part of the run in which failures fall and what is before it.
    """
    last = int(SPAN[1] * plan.workload().steps) // plan.every
    steps = {round(number) * plan.every for number in np.linspace(1, last, samples)}
    measured, exponents = [], list[Row]()
    with one_thread(), tempfile.TemporaryDirectory(prefix="dsq-stages-") as directory:
        for before, now, path in _chain(plan, Method("lc", "lc", {"bits": bits}), Path(directory), steps):
            differences = {name: (now[name] - before[name]).numpy().ravel() for name in now}
            sizes, elements = Manifest.read(path).kinds["weights"], sum(map(len, differences.values()))
            assert sizes.logical == 4 * elements, "the differences are not those of the compressed weights"
            indices = sum(
                np.log2(len(buckets_of(values).counts)) * len(values) for values in differences.values()
            )
            measured.append((float(indices) / elements, 8 * sizes.base / elements))
            convolutions = [name for name in now if now[name].ndim == 4]
            exponents = exponents_of(differences[convolutions[-1]], bits) if convolutions else []
    index, coded = (statistics.fmean(column) for column in zip(*measured, strict=True))
    return {
        "workload": plan.name, "bits": bits, "steps": sorted(steps), "buckets": 2**index,
        "bits_exponents": index, "bits_promoted": float(bits), "bits_coded": coded, "share_exponents": index / FP32,
        "share_promoted": bits / FP32, "share_coded": coded / FP32, "exponents": exponents,
    }


def exponents_of(values: F32, bits: int) -> list[Row]:
    """Return the share of values by exponent, the largest first, before and after priority promotion."""
    ascending, counts = np.unique(values + np.float32(0), return_counts=True)
    _, codes = exponent_buckets(ascending, ascending, ascending, counts, bits)
    exponent = _exponents(ascending)
    return [
        {"exponent": int(power) if power > ZERO else None, "share": float(counts[same].sum() / len(values)),
         "promoted": float(counts[same & (codes > 0)].sum() / len(values))}
        for power in np.unique(exponent)[::-1] for same in [exponent == power]
    ]


def deleted(plan: Experiment, start: int) -> list[Row]:
    """Delete each bucket of differences of 10 to 60 iterations: the relative error of the loss, equation 2.

    Args:
        plan: The run; its checkpoints do not matter.
        start: Iteration of the state that differences are added to.
    """
    with one_thread():
        workload = plan.workload()
        probe = Probe(workload)
        workload.train(0, start)
        base = _vector(workload.model)
        rows = []
        for span in SPANS:
            first, last = start + STRIDE * (span - 1), start + STRIDE * span
            workload.train(first, last)
            state = _vector(workload.model)
            figures = _deletions(state - base, Loss(workload.model, probe, base))
            rows.append({"workload": plan.name, "start": start, "iterations": STRIDE * span, **figures})
            _set(workload.model, state)  # training goes on from where it was
    return rows


class Loss:
    """The loss of a model at a state plus a difference, which the model is left with."""

    def __init__(self, model: nn.Module, probe: Probe, base: F32) -> None:
        self._model, self._probe, self._base = model, probe, base

    def __call__(self, difference: F32) -> float:
        """Return L(base + difference)."""
        _set(self._model, self._base + difference)
        return self._probe(self._model)


def _deletions(difference: F32, loss: Callable[[F32], float]) -> Row:
    """Return the loss, and by bucket and by number of bits the relative error without what is deleted."""
    exact, buckets = loss(difference), buckets_of(difference)

    def error(gone: Mask) -> float:
        return float(((exact - loss(np.where(gone, np.float32(0), difference))) / exact) ** 2)

    errors = [error(buckets.members == place) for place in range(len(buckets.counts))]
    promoted = {f"kept_{bits}": sum(errors[: 2**bits - 1]) / sum(errors) for bits in PROMOTED}
    few = {f"elements_{bits}": int(buckets.counts[: 2**bits - 1].sum()) / len(difference) for bits in PROMOTED}
    dropped = {f"without_rest_{bits}": error(buckets.members >= 2**bits - 1) for bits in PROMOTED}
    return {
        "loss": exact, "positive": float((difference > 0).mean()), "largest": int(np.argmax(errors)) + 1,
        **promoted, **few, **dropped,
        "buckets": [
            {"bucket": place + 1, "exponent": int(buckets.exponents[place]) if buckets.signs[place] else None,
             "sign": int(buckets.signs[place]), "count": int(buckets.counts[place]), "error": errors[place]}
            for place in range(len(errors))
        ],
    }


def _vector(model: nn.Module) -> F32:
    vector: F32 = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    return vector


def _set(model: nn.Module, vector: F32) -> None:
    nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())


def _chain(
    plan: Experiment, method: Method, run: Path, steps: set[int]
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor], Path]]:
    """Yield at given steps the weights as reconstructed before, as they are, and the checkpoint that says so."""
    config, workload = method.config(), plan.workload()
    names, paths, exact = _compressed(workload.model, config), dict[int, Path](), dict[int, dict[str, Tensor]]()
    for step, path in checkpoints(workload, plan.every, config, run, max(steps)):
        paths[step] = path
        if step in steps:
            exact[step] = _weights(workload.model, names)
    with dsq_ckpt.Compressor(workload.model, workload.optimizer, {"system": "exact"}) as loader:
        for step, now in exact.items():  # at the end: the checkpoint that is loaded would be the next one's parent
            loader.load(paths[step - plan.every])
            yield _weights(workload.model, names), now, paths[step]


def _compressed(model: nn.Module, config: dsq_ckpt.DSQConfig) -> list[str]:
    """Return the names of the parameters that a configuration does not leave exact."""
    types = layer_types(model)
    return [
        name for name, parameter in model.named_parameters()
        if assign(f"model.{name}", parameter.shape, parameter.dtype, config.quantize, types).config is not None
    ]


def _weights(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in names}


STAGES = (
    Column("<workload", "workload"), Column("bits", "bits"), Column("buckets", "buckets", digits(1)),
    Column("E, bits", "bits_exponents", digits(2)), Column("E+P", "bits_promoted", digits(2)),
    Column("E+P+H", "bits_coded", digits(2)), Column("E, of fp32", "share_exponents", percent),
    Column("E+P", "share_promoted", percent), Column("E+P+H", "share_coded", percent),
)
STAGES_NOTES = """\
per value of compressed weights, mean over checkpoints; E: exponent-based quantization, log2 of the buckets in use;
P: priority promotion; H: Huffman coding, as it is in the files. Without tables of levels, index and manifest."""
DELETED = (
    Column("<workload", "workload"), Column("iterations", "iterations"), Column("loss", "loss", digits(4)),
    Column("largest", "largest"),
    *(Column(f"first {2**bits - 1}", f"kept_{bits}", percent) for bits in PROMOTED),
    *(Column(f"elements {2**bits - 1}", f"elements_{bits}", percent) for bits in PROMOTED),
    *(Column(f"alone {2**bits - 1}", f"without_rest_{bits}", "{:.1e}".format) for bits in PROMOTED),
)
DELETED_NOTES = """\
relative error of the loss, squared, when a bucket is set to zero (equation 2); largest: the bucket of the largest one;
first n: share of the sum of all errors that is in the n buckets of largest exponent; elements n: share of the elements
in these; alone n: the error when all others are set to zero at once."""
