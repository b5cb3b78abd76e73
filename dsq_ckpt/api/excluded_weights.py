"""Weights that a `Compressor` leaves out of checkpoints: with `frozen=False`, those that need no gradient.

Adapters fit the model that they were trained on and no other, so manifests have checksums of the weights left out.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsq_ckpt.api import background
from dsq_ckpt.api.optimizer_state import get_parameter_states
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.sampled_checksums import SampleSum, join_sums, sum_sample
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.gradients.sensitivity import get_named_parameters
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.paths import require_checkpoint_path

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

    def find_trained(self, path: str | os.PathLike[str]) -> set[str]:
        """Return the names of these parameters that a checkpoint has and that were trained, at its save or before.

        A save with `frozen=False` has no other weights. In any other checkpoint, the optimizer's state decides.
        """
        if not self.names:
            return set()
        background.wait()
        directory = require_checkpoint_path(path)
        with CheckpointFiles(directory) as files, files.translate_errors():
            nesting = Nesting.from_json(files.index) or Nesting({})
        saved = {str(path[1]) for path in nesting.values() if path[0] == "model" and len(path) > 1}
        if Manifest.read(directory).excluded is None:
            states = {str(path[2]) for path in nesting.values() if path[:2] == ("optimizer", "state") and len(path) > 2}
            trained = {id(parameter) for name, parameter in self._parameters().items() if name in states}
            saved &= {name for name, parameter in self._parameters().items() if id(parameter) in trained}
        return self.names & saved

    def select_others(self, state: dict[str, Any], trained: Collection[str] = ()) -> dict[str, Any]:
        """Return the entries of the model's state dict that are saved, or loaded.

        torch's `ignore_frozen_params` keeps tied frozen ones.

        Args:
            state: the model's state dict.
            trained: names of parameters that are kept; see `find_trained`.
        """
        selected = copy.copy(state)  # keeps `_metadata`, the versions of modules
        for name in (self.names & selected.keys()).difference(trained):
            del selected[name]
        return selected

    def check_others(self, selected: Mapping[str, Any], comm: Communicator) -> None:
        """Check that not all of the model is left out: a rank may have a frozen stage; collective over `comm`.

        Args:
            selected: as from `select_others`.
            comm: communicator of the ranks that save or load.

        Raises:
            ConfigError: all is left out.
        """
        ranks = gather_from_all_ranks(comm, lambda: (bool(selected), bool(self.names)))
        if not any(has_others for has_others, _ in ranks) and any(is_frozen for _, is_frozen in ranks):
            raise ConfigError("frozen is False, but all of the model is frozen: there is nothing of it to save or load")

    def warn_of_trained(self, optimizer: Optimizer | None) -> None:
        """Warn of weights that are not saved although the optimizer has trained them, as of an inactive adapter."""
        states = {} if optimizer is None else get_parameter_states(optimizer)
        if trained := sorted(name for name, parameter in self._parameters().items() if states.get(parameter)):
            warn(
                f"weights that the optimizer has state of are not saved: {quote(trained)} need no gradient at the "
                "moment, and frozen is False; turn their gradients on for saves, or pass frozen=True"
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
            checksums.update(Manifest.read(directory).excluded or {})
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
