"""Averages of trained weights, distinguished from other tensors that training changes without a gradient.

An average, such as a teacher's weights, lies near the weights that it averages, so the settings of these suit it. A
codebook that follows its inputs, sums of inputs by code, memory banks and statistics may have the shape of some
weights, but not their values. Their rows may differ in size by their use, and one step for all would lose rarely used
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

from dsq_ckpt.core.autocast import no_autocast

_K = TypeVar("_K", bound=Hashable)
_LEAST = 0.5
"""Agreement from which a tensor counts as an average.

Averages over 100 and 1,000 steps agree by 0.7 to 1, except in the first steps of weights that begin as zeros; other
tensors hardly by more than 0.1. A tensor below is stored exactly, which costs only bytes.
"""
_LEAST_OF_RUN = 0.25
"""Agreement of a run of elements from which they have one size; about 8 times larger or smaller ones have less."""
_MOST_OTHERS = 0.1
"""Share of runs that may have less; a codebook of weights' values and sums of its codes have more of them."""
_RUN = 16
_RUNS = 64
"""Number of runs that are compared: unrelated tensors agree by about 0.03."""
_FEWEST = 64
"""Elements below which agreement may be chance."""
_GOLDEN = 0.6180339887


class _Form(NamedTuple):
    """Form of tensors whose elements correspond by position."""

    sharded: bool
    shape: torch.Size
    local: torch.Size


@torch.no_grad()
@no_autocast()
def find_averages(changed: Mapping[_K, torch.Tensor], trained: Iterable[torch.Tensor]) -> set[_K]:
    """Return the keys of tensors that lie as is_near a trained tensor of the same form as an average of it would.

    Nearly all their parts must lie is_near, since rows of another size would need another step. The agreement of two
    tensors is Lin's concordance: twice their covariance over the sum of their variances and the squared difference of
    their means. It is 1 for equal tensors, and small for tensors of different sizes. Of shards, those of this rank are
    compared. Each device is synchronized once.

    Args:
        changed: tensors that have changed, by key.
        trained: trained tensors.
    """
    forms: dict[_Form, list[_K]] = defaultdict(list)
    for key, tensor in changed.items():
        if (form := _form(tensor)) is not None:
            forms[form].append(key)
    others: dict[_Form, list[torch.Tensor]] = defaultdict(list)
    if forms:
        for tensor in trained:
            if (form := _form(tensor)) in forms and form is not None:
                others[form].append(tensor)
    pairs = [(forms[form], others[form]) for form in others]
    samples = _copy_to_host([
        _sample(tensor) for keys, same in pairs for tensor in (*map(changed.__getitem__, keys), *same)
    ])
    averages, index = set[_K](), 0
    for keys, same in pairs:
        values = torch.stack(samples[index : index + len(keys) + len(same)])
        index += len(values)
        is_near = _are_near(values[: len(keys)], values[len(keys) :]).tolist()
        averages.update(key for key, hit in zip(keys, is_near, strict=True) if hit)
    return averages


def _are_near(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return, for each row, whether it is near the row of `others` that it agrees with most."""
    agreement, best = _agreement(rows, others).nan_to_num().max(1)
    runs, other_runs = rows.unflatten(1, (-1, _RUN)), others[best].unflatten(1, (-1, _RUN))
    squares = (runs.square() + other_runs.square()).sum(2)
    disagrees = 2 * (runs * other_runs).sum(2) < _LEAST_OF_RUN * squares
    return (agreement > _LEAST) & (disagrees.double().mean(1) <= _MOST_OTHERS)


def _agreement(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the agreement of each row with each row of `others`; NaN if both are constant."""
    means, other_means = rows.mean(1), others.mean(1)
    rows, others = rows - means[:, None], others - other_means[:, None]
    common = rows @ others.T / rows.shape[1]
    spread = rows.square().mean(1)[:, None] + others.square().mean(1)
    return 2 * common / (spread + (means[:, None] - other_means).square())


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _form(tensor: torch.Tensor) -> _Form | None:
    """Return the form of a tensor that can be sampled and has enough elements; else None."""
    local = _local_tensor(tensor)
    strided = local.layout is torch.strided and local.is_floating_point() and not hasattr(local, "__tensor_flatten__")
    if not strided or local.numel() < _FEWEST:
        return None
    return _Form(hasattr(tensor, "_local_tensor"), tensor.shape, local.shape)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return runs of elements at scattered positions, the same for all tensors of a form; float64, flat."""
    local = _local_tensor(tensor)
    room = local.numel() - _RUN + 1
    runs = torch.arange(min(_RUNS, local.numel() // _RUN), device=local.device) * (int(room * _GOLDEN) | 1) % room
    return local.take((runs[:, None] + torch.arange(_RUN, device=local.device)).view(-1)).double()


def _copy_to_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    for device in {sample.device for sample in samples} - {torch.device("cpu")}:
        numbers = [number for number, sample in enumerate(samples) if sample.device == device]
        values = torch.cat([samples[number] for number in numbers]).cpu()
        for number, sample in zip(numbers, values.split([len(samples[number]) for number in numbers]), strict=True):
            samples[number] = sample
    return samples
