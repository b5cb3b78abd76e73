"""Averages of trained weights, told from other tensors that training moves without a gradient.

An average, such as a teacher's weights, lies near the weights that it averages, so that what suits these suits it. A
codebook that follows its inputs, sums of them by code, memory banks and statistics may have the shape of some weights,
but not their values; their rows may differ in size by their use, and one step for all would lose those of little use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

_K = TypeVar("_K", bound=Hashable)
_LEAST = 0.5
"""Agreement from which on a tensor counts as an average.

Averages over 100 and 1,000 steps have 0.7 to 1 of it, but for the first steps of weights that begin as zeros; other
tensors hardly more than 0.1. One below is stored exactly, which costs bytes alone.
"""
_SAMPLE = 512
"""Elements that tell: two tensors that have nothing to do with each other agree by 0.05, give or take."""
_FEWEST = 64
"""Elements below which chance may tell."""
_GOLDEN = 0.6180339887


class _Form(NamedTuple):
    """Form of tensors whose elements lie at the same places."""

    sharded: bool
    shape: torch.Size
    local: torch.Size


@torch.no_grad()
def averages(moved: Mapping[_K, torch.Tensor], trained: Iterable[torch.Tensor]) -> set[_K]:
    """Return the keys of tensors that lie near a trained one of the same form: as near as an average of it would.

    The agreement (Lin's concordance) of two tensors is twice their covariance, in parts of the mean square of their
    difference and that covariance together: 1 for equal ones, and little for those that have other sizes. Of shards,
    those of this rank are compared. Each device is waited for once.
    """
    forms: dict[_Form, list[_K]] = defaultdict(list)
    for key, tensor in moved.items():
        if (form := _form(tensor)) is not None:
            forms[form].append(key)
    others: dict[_Form, list[torch.Tensor]] = defaultdict(list)
    if forms:
        for tensor in trained:
            if (form := _form(tensor)) in forms and form is not None:
                others[form].append(tensor)
    pairs = [(forms[form], others[form]) for form in others]
    seen = _on_host([_sample(tensor) for keys, beside in pairs for tensor in (*map(moved.__getitem__, keys), *beside)])
    found, place = set[_K](), 0
    for keys, beside in pairs:
        values = torch.stack(seen[place : place + len(keys) + len(beside)])
        place += len(values)
        near = (_agreement(values[: len(keys)], values[len(keys) :]) > _LEAST).any(1).tolist()
        found.update(key for key, one in zip(keys, near, strict=True) if one)
    return found


def _agreement(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the agreement of each row with each of others; NaN where there is none."""
    means, other_means = rows.mean(1), others.mean(1)
    rows, others = rows - means[:, None], others - other_means[:, None]
    common = rows @ others.T / rows.shape[1]
    spread = rows.square().mean(1)[:, None] + others.square().mean(1)
    return 2 * common / (spread + (means[:, None] - other_means).square())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _form(tensor: torch.Tensor) -> _Form | None:
    """Return the form of a tensor of whose elements some can be taken, and enough."""
    local = _local(tensor)
    if hasattr(local, "__tensor_flatten__") or local.layout is not torch.strided or local.numel() < _FEWEST:
        return None
    return _Form(hasattr(tensor, "_local_tensor"), tensor.shape, local.shape)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements, in any row and column, the same ones of each tensor of a form."""
    local = _local(tensor)
    count = local.numel()
    places = torch.arange(min(_SAMPLE, count), device=local.device)
    return local.take((places * (int(count * _GOLDEN) | 1)) % count).double()


def _on_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    for device in {one.device for one in samples} - {torch.device("cpu")}:
        mine = [number for number, one in enumerate(samples) if one.device == device]
        seen = torch.cat([samples[number] for number in mine]).cpu()
        for number, sample in zip(mine, seen.split([len(samples[number]) for number in mine]), strict=True):
            samples[number] = sample
    return samples
