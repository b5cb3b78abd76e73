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

from dsq_ckpt.core.autocast import no_autocast

_K = TypeVar("_K", bound=Hashable)
_LEAST = 0.5
"""Agreement from which on a tensor counts as an average.

Averages over 100 and 1,000 steps have 0.7 to 1 of it, but for the first steps of weights that begin as zeros; other
tensors hardly more than 0.1. One below is stored exactly, which costs bytes alone.
"""
_LEAST_OF_RUN = 0.25
"""Agreement of elements in a row from which on they are of one size: about 8 times larger or smaller ones have less."""
_MOST_OTHERS = 0.1
"""Part of the runs that may have less: a codebook of weights' values by sums of its codes has more of them."""
_RUN = 16
_RUNS = 64
"""Runs of so many elements tell: tensors that have nothing to do with each other agree by 0.03, give or take."""
_FEWEST = 64
"""Elements below which chance may tell."""
_GOLDEN = 0.6180339887


class _Form(NamedTuple):
    """Form of tensors whose elements lie at the same places."""

    sharded: bool
    shape: torch.Size
    local: torch.Size


@torch.no_grad()
@no_autocast()
def averages(moved: Mapping[_K, torch.Tensor], trained: Iterable[torch.Tensor]) -> set[_K]:
    """Return the keys of tensors that lie near a trained one of the same form: as near as an average of it would.

    Nearly all their parts do so, since rows of another size would not bear the same step. The agreement (Lin's
    concordance) of two tensors is twice their covariance, in parts of that and the mean square of their difference: 1
    for equal ones, and little for those of other sizes. Of shards, those of this rank are compared. Each device is
    waited for once.
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
        near = _near(values[: len(keys)], values[len(keys) :]).tolist()
        found.update(key for key, one in zip(keys, near, strict=True) if one)
    return found


def _near(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return whether each row is near the one of others that it agrees with most."""
    agreement, best = _agreement(rows, others).nan_to_num().max(1)
    runs, beside = rows.unflatten(1, (-1, _RUN)), others[best].unflatten(1, (-1, _RUN))
    spread = (runs.square() + beside.square()).sum(2)
    less = 2 * (runs * beside).sum(2) < _LEAST_OF_RUN * spread
    return (agreement > _LEAST) & (less.double().mean(1) <= _MOST_OTHERS)


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
    strided = local.layout is torch.strided and local.is_floating_point() and not hasattr(local, "__tensor_flatten__")
    if not strided or local.numel() < _FEWEST:
        return None
    return _Form(hasattr(tensor, "_local_tensor"), tensor.shape, local.shape)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return runs of elements, in any row and column, the same ones of each tensor of a form."""
    local = _local(tensor)
    room = local.numel() - _RUN + 1
    runs = torch.arange(min(_RUNS, local.numel() // _RUN), device=local.device) * (int(room * _GOLDEN) | 1) % room
    return local.take((runs[:, None] + torch.arange(_RUN, device=local.device)).view(-1)).double()


def _on_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    for device in {one.device for one in samples} - {torch.device("cpu")}:
        mine = [number for number, one in enumerate(samples) if one.device == device]
        seen = torch.cat([samples[number] for number in mine]).cpu()
        for number, sample in zip(mine, seen.split([len(samples[number]) for number in mine]), strict=True):
            samples[number] = sample
    return samples
