"""`DSQModelParallelStrategy`: sharded checkpoints of FSDP2 and tensor parallelism, which all ranks save and load."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dsq_ckpt.api.loading import load
from dsq_ckpt.api.optimizer_state import get_optimizer_state, require_gradients, set_optimizer_state
from dsq_ckpt.api.saving import ConfigLike, as_config, save
from dsq_ckpt.core.arguments import expect, expect_on_save
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.distributed.comm import communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.integrations.lightning import placing
from dsq_ckpt.integrations.lightning.layout import Rest, explained, rest_of, to_state
from dsq_ckpt.integrations.staged import settle
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.paths import resolve_checkpoint_path

PathLike = placing.PathLike


class DSQModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` with compressed sharded checkpoints, for `Trainer(strategy=DSQModelParallelStrategy())`.

    Every rank saves its shards, and loads into any number of ranks. Checkpoints of `DSQCheckpointIO` are loaded too,
    and those of Lightning's own strategy.

    Args:
        data_parallel_size: as in `ModelParallelStrategy`.
        tensor_parallel_size: as in `ModelParallelStrategy`.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        pinned: keep the refinement layer of every checkpoint that Lightning keeps, see `DSQCheckpointIO`.
        on_save: called on rank 0 with the `SaveResult` of each complete checkpoint, for a logger.
        process_group_backend: as in `ModelParallelStrategy`.
        timeout: as in `ModelParallelStrategy`.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        *,
        config: ConfigLike = None,
        pinned: bool = True,
        on_save: OnSave | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size, tensor_parallel_size, save_distributed_checkpoint=True,
            process_group_backend=process_group_backend, timeout=timeout,
        )
        self.config = as_config(config)
        expect("pinned", pinned, bool, "True or False")
        expect_on_save(on_save)
        self.pinned, self.on_save = pinned, on_save

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by names of parameters, sharded, with all that it tells."""
        assert self.model is not None
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state(self.model, own, StateDictOptions(cpu_offload=True))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint dict, whose tensors are sharded; what is at the path is replaced. Collective.

        Raises:
            ConfigError: there are `storage_options`.
            SaveFailed: a value of the dict cannot be stored; the message names it.
            DSQError: what else failed, on every rank. Earlier checkpoints are untouched.
        """
        comm, fsync = communicator(None), self.config.storage.fsync
        goal = resolve_checkpoint_path(self.broadcast(filepath))
        state: dict[str, Any] = {}

        def begin() -> Path | None:
            if storage_options is not None:
                raise ConfigError(
                    f"storage_options is {storage_options!r}, expected None: {type(self).__name__}(config=...) has all "
                    "settings"
                )
            state.update(to_state(checkpoint, everything=self.is_global_zero))
            if not self.is_global_zero:
                return None
            placing.make_parents(goal, fsync)
            return placing.directory_for(goal)

        target = gather_from_all_ranks(comm, begin)[0]
        assert target is not None
        tuner = placing.is_of_tuner(goal)
        result = save(
            state, target, config="exact" if tuner else self.config, parent=None if tuner else "auto", overwrite=True,
            model=self.lightning_module, pinned=self.pinned, history=SaveHistory() if tuner else None,
            on_save=None if tuner else self.on_save,
        )
        run_on_all_ranks(comm, lambda: placing.put_in_place(target, goal, fsync) if self.is_global_zero else None)
        if target != goal:
            settle(result, goal, self.config, comm.rank, self.on_save)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers from a checkpoint and return the rest of Lightning's dict; collective.

        `weights_only` is for checkpoints of Lightning's own.

        Raises:
            LoadFailed: the checkpoint lacks what the model or an optimizer has, or has weights that the model lacks
                and `strict_loading` is on.
            DSQError: what else failed, on every rank.
        """
        path = self.broadcast(checkpoint_path)
        comm = communicator(None)
        if not any(gather_from_all_ranks(comm, lambda: placing.is_ours(path), LoadFailed)):
            return super().load_checkpoint(path, weights_only=weights_only)
        directory = placing.resolved(path)
        with explained(directory):
            rest = run_on_all_ranks(comm, lambda: _rest_at(directory), LoadFailed)
            state = run_on_all_ranks(comm, lambda: self._expected(rest), LoadFailed)
            load(state, directory)
            run_on_all_ranks(comm, lambda: self._take(state, rest), LoadFailed)
        return rest.without_tensors()

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove a checkpoint; every other one stays complete."""
        if self.is_global_zero:
            placing.remove(filepath)

    def _expected(self, rest: Rest) -> dict[str, Any]:
        """Return the tensors of model and optimizers to load into.

        Raises:
            LoadFailed: they are not those of the checkpoint.
        """
        assert self.model is not None and self.lightning_module is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # the root may be gathered, after an evaluation
                module.reshard()
        model = {
            name: value for name, value in get_model_state_dict(self.model).items() if isinstance(value, torch.Tensor)
        }
        if self.lightning_module.strict_loading:
            _refuse(model.keys() - rest.weights(), "the checkpoint lacks", "of the model")
            _refuse(rest.weights() - model.keys(), "the model lacks", "of the checkpoint")
        state: dict[str, Any] = {
            "state_dict": {name: value for name, value in model.items() if name in rest.weights()},
            "optimizer_states": {},
        }
        optimizers = self._trained()
        if optimizers and rest.optimizers != len(optimizers):
            raise LoadFailed(
                "the checkpoint has weights only, and training needs the state of optimizers: load it without "
                "ckpt_path, or resume from one that was saved without save_weights_only" if rest.optimizers is None
                else f"the checkpoint has {rest.optimizers} optimizer(s), the model {len(optimizers)}"
            )
        for number, optimizer in enumerate(optimizers):
            stored = rest.moments(number)
            with require_gradients(self.model, {name for name, _ in stored}):
                own = self._optimizer_state(optimizer)["state"]
            _refuse(
                {f"{name}.{leaf}" for name, leaf in stored if leaf not in own.get(name, ())},
                f"optimizer {number} lacks", "of the checkpoint (an optimizer that is made of named_parameters() has "
                "names in any checkpoint; one that has stepped has no state of parameters that were frozen)",
            )
            moments: dict[str, dict[str, Any]] = {}
            for name, leaf in stored:
                moments.setdefault(name, {})[leaf] = own[name][leaf]
            state["optimizer_states"][str(number)] = {"state": moments}
        return {key: value for key, value in state.items() if value}

    def _take(self, state: dict[str, Any], rest: Rest) -> None:
        """Give loaded tensors to model and optimizers."""
        assert self.model is not None and self.lightning_module is not None
        options = StateDictOptions(strict=self.lightning_module.strict_loading)
        with in_user_code(loads_module=True):
            set_model_state_dict(self.model, {**state.get("state_dict", {}), **rest.extra_state()}, options=options)
        for number, optimizer in enumerate(self._trained()):
            moments = state["optimizer_states"][str(number)]["state"]
            found = rest.optimizer(number, moments)
            own = self._optimizer_state(optimizer)["state"]  # of parameters that had no step yet
            found["state"] = {**own, **found["state"]}
            with in_user_code():
                set_optimizer_state(self.model, optimizer, found)

    def _trained(self) -> list[Any]:
        """Return the optimizers whose state is loaded; an evaluation has none, or those of a training before it."""
        assert self.lightning_module is not None
        return list(self.optimizers) if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return get_optimizer_state(self.model, optimizer)


def _rest_at(directory: Path) -> Rest:
    """Return what a checkpoint has beside tensors; each rank reads it by itself."""
    with Checkpoint(directory) as checkpoint:
        ours = "lightning.checkpoint" in checkpoint.index["objects"]
    state: dict[str, Any] = {"lightning": {}} if ours else {"lightning": None}
    if ours:
        load(state, directory, no_dist=True)
    return rest_of(state)


def _refuse(names: Collection[str], problem: str, of: str) -> None:
    """Refuse a checkpoint whose names are others."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LoadFailed(f"{problem} '{min(names)}'{more} {of}")
