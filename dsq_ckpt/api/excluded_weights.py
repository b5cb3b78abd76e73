"""Weights that a `Compressor` leaves out of checkpoints: with `frozen=False`, those that need no gradient.

Adapters fit the model that they were trained on and no other, so manifests have checksums of the weights left out.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsq_ckpt.api.optimizer_state import get_parameter_states
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.sampled_checksums import SampleSum, join_sums, sum_sample
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.gradients.sensitivity import get_named_parameters
from dsq_ckpt.storage.manifest import Manifest

_MAX_CHECKSUMS = 64
"""Number of weights with a checksum in a manifest: another model differs in most of its weights."""


class ExcludedWeights:
    """Parameters of a model that checkpoints do not contain.

    Args:
        model: the model.
        frozen: whether parameters that need no gradient are saved; if so, none is left out.
    """

    def __init__(self, model: nn.Module, frozen: bool) -> None:
        self._model, self._frozen = model, frozen

    @property
    def names(self) -> set[str]:
        """All names of these parameters."""
        return set(self._parameters())

    def select_others(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the saved entries of the model's state dict; torch's `ignore_frozen_params` keeps tied frozen ones."""
        selected = copy.copy(state)  # keeps `_metadata`, the versions of modules
        for name in self.names & selected.keys():
            del selected[name]
        if state and not selected:  # a load would fill the empty dict with frozen weights
            raise ConfigError("frozen is False, but all of the model is frozen: there is nothing of it to save or load")
        return selected

    def warn_of_trained(self, optimizer: Optimizer | None) -> None:
        """Warn of weights that are not saved although the optimizer has trained them, as of an inactive adapter."""
        states = {} if optimizer is None else get_parameter_states(optimizer)
        if trained := sorted(name for name, parameter in self._parameters().items() if states.get(parameter)):
            warn(
                f"weights that the optimizer has state of are not saved: {quote(trained)} need no gradient at the "
                "moment, and frozen is False; turn their gradients on for saves and loads, or pass frozen=True"
            )

    def sum_samples(self, names: Collection[str] | None = None) -> dict[str, SampleSum]:
        """Return sums of this rank's samples of tensors, by name; `names` selects the tensors, None: some of all."""
        tensors = dict(pair for name, weight in self._parameters().items() for pair in _plain_tensors(name, weight))
        chosen = _choose(tensors) if names is None else names
        sums = dict[str, SampleSum]()
        for name in tensors.keys() & chosen:
            with suppress(RuntimeError):  # tensors of a class that has no such elements; a warning is all this is for
                if (sample_sum := sum_sample(tensors[name])) is not None:
                    sums[name] = sample_sum
        return sums

    def warn_of_changes(self, directory: Path, comm: Communicator) -> None:
        """Warn of weights that are not those that a checkpoint was saved with; collective over `comm`."""
        checksums = dict[str, str]()

        def sum_saved() -> dict[str, SampleSum]:
            checksums.update(Manifest.read(directory).excluded)
            return self.sum_samples(checksums)

        ranks = gather_from_all_ranks(comm, sum_saved, LoadFailed)
        groups = [ranks, *([rank] for rank in ranks)]  # a rank that has whole tensors may have others than the rest
        present = {pair for group in groups for pair in join_ranks(group).items()}
        if changed := sorted({
            name for name, text in present
            if text.rpartition(" ")[0] == checksums[name].rpartition(" ")[0] and text != checksums[name]
        }):
            warn(
                f"{quote(changed)} of this model have other values than at the save of '{directory}', which has "
                f"checksums of {len(checksums)} tensors that it leaves out (frozen=False): what is loaded was trained "
                "beside those values. Load it into the model that it was trained in. If adapters change that model in "
                "each process, as some initializations do, save with frozen=True", rank=comm.rank,
            )

    def _parameters(self) -> dict[str, nn.Parameter]:
        parameters = {} if self._frozen else get_named_parameters(self._model)
        return {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}


def join_ranks(ranks: Sequence[Mapping[str, SampleSum]]) -> dict[str, str]:
    """Return checksums of tensors by name, at most `_MAX_CHECKSUMS`, from the sums of all ranks."""
    sums: dict[str, list[SampleSum]] = {}
    for rank in ranks:
        for name, sample_sum in rank.items():
            sums.setdefault(name, []).append(sample_sum)
    texts = {name: join_sums(of_ranks) for name, of_ranks in sums.items()}
    checksums = {name: text for name, text in texts.items() if text is not None}
    return {name: checksums[name] for name in _choose(checksums)}


def _choose(names: Iterable[str]) -> list[str]:
    """Return all names, or `_MAX_CHECKSUMS` of them, spread evenly in alphabetical order."""
    ordered = sorted(names)
    count = min(len(ordered), _MAX_CHECKSUMS)
    return [ordered[number * len(ordered) // count] for number in range(count)]


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, or the inner tensors of one that packs them, as of a quantized model, with their names."""
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for key in tensor.__tensor_flatten__()[0]:
        if isinstance(inner := getattr(tensor, key), torch.Tensor):
            yield from _plain_tensors(f"{name}.{key}", inner)
