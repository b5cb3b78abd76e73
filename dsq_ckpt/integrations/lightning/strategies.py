"""`DSQModelParallelStrategy`: sharded checkpoints of FSDP2 and tensor parallelism, which all ranks save and load."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
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
from dsq_ckpt.core.arguments import expect_flags, expect_on_save
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.distributed.comm import communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.integrations.lightning import checkpoint_paths
from dsq_ckpt.integrations.lightning.layout import CheckpointSkeleton, explain_load_errors, pop_skeleton, to_state_dict
from dsq_ckpt.integrations.staged_checkpoint import finalize_save
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.paths import resolve_checkpoint_path

PathLike = checkpoint_paths.PathLike


class DSQModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` with compressed sharded checkpoints, for `Trainer(strategy=DSQModelParallelStrategy())`.

    Every rank saves its shards. A checkpoint can be loaded on any number of ranks. Checkpoints of `DSQCheckpointIO` and
    of Lightning's own strategy are loaded too.

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
        expect_flags(pinned=pinned)
        expect_on_save(on_save)
        self.pinned, self.on_save = pinned, on_save

    def setup(self, trainer: Trainer) -> None:
        """Set up as `ModelParallelStrategy` does.

        Raises:
            ConfigError: training has the callback `WeightAveraging`, whose checkpoints Lightning cannot resume from.
        """
        averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        if averaging and trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                f"the callback {type(averaging[0]).__name__} is there, and Lightning resumes no run of "
                "ModelParallelStrategy with it: remove the callback, or average in a callback of your own that returns "
                "the weights from state_dict()"
            )
        super().setup(trainer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the complete sharded state of an optimizer by parameter name."""
        assert self.model is not None
        unwrapped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state(self.model, unwrapped, StateDictOptions(cpu_offload=True))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint dict, whose tensors are sharded; anything at the path is replaced. Collective.

        Raises:
            ConfigError: `storage_options` is not None.
            SaveFailed: a value of the dict cannot be stored; the message names it.
            DSQError: any other failure, on every rank. Earlier checkpoints are untouched.
        """
        comm, fsync = communicator(None), self.config.storage.fsync
        target = resolve_checkpoint_path(self.broadcast(filepath))
        state: dict[str, Any] = {}

        def prepare_save_directory() -> Path | None:
            if storage_options is not None:
                raise ConfigError(
                    f"storage_options is {storage_options!r}, expected None: {type(self).__name__}(config=...) has all "
                    "settings"
                )
            state.update(to_state_dict(checkpoint, include_skeleton=self.is_global_zero))
            if not self.is_global_zero:
                return None
            checkpoint_paths.create_parent_directory(target, fsync)
            return checkpoint_paths.choose_save_directory(target)

        save_directory = gather_from_all_ranks(comm, prepare_save_directory)[0]
        assert save_directory is not None
        is_tuner = checkpoint_paths.is_tuner_path(target)
        result = save(
            state, save_directory, config="exact" if is_tuner else self.config, parent=None if is_tuner else "auto",
            overwrite=True, model=self.lightning_module, pinned=self.pinned,
            history=SaveHistory() if is_tuner else None, on_save=None if is_tuner else self.on_save,
        )
        def publish() -> None:
            if self.is_global_zero:
                checkpoint_paths.publish_directory(save_directory, target, fsync)

        run_on_all_ranks(comm, publish)
        if save_directory != target:
            finalize_save(result, target, self.config, comm.rank, self.on_save)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers from a checkpoint, and return the other entries of Lightning's dict; collective.

        `weights_only` is used for checkpoints of Lightning's own only.

        Raises:
            LoadFailed: keys of the model or of an optimizer are missing in the checkpoint; or the checkpoint has
                unexpected weights and `strict_loading` is on.
            DSQError: any other failure, on every rank.
        """
        path = self.broadcast(checkpoint_path)
        comm = communicator(None)
        if not any(gather_from_all_ranks(comm, lambda: checkpoint_paths.has_complete_checkpoint(path), LoadFailed)):
            return super().load_checkpoint(path, weights_only=weights_only)
        directory = checkpoint_paths.resolve_link(path)
        with explain_load_errors(directory):
            skeleton = run_on_all_ranks(comm, lambda: _load_skeleton(directory), LoadFailed)
            state = run_on_all_ranks(comm, lambda: self._collect_placeholders(skeleton), LoadFailed)
            load(state, directory)
            run_on_all_ranks(comm, lambda: self._apply_loaded(state, skeleton), LoadFailed)
        return skeleton.get_other_entries()

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove a checkpoint; all others stay complete."""
        if self.is_global_zero:
            checkpoint_paths.remove_checkpoint(filepath)

    def _collect_placeholders(self, skeleton: CheckpointSkeleton) -> dict[str, Any]:
        """Return the tensors of model and optimizers to load into.

        Raises:
            LoadFailed: keys differ from those of the checkpoint.
        """
        assert self.model is not None and self.lightning_module is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # the root may still be gathered after an evaluation
                module.reshard()
        model = {
            name: value for name, value in get_model_state_dict(self.model).items() if isinstance(value, torch.Tensor)
        }
        if self.lightning_module.strict_loading:
            _require_no_names(model.keys() - skeleton.weight_names(), "the checkpoint lacks", "of the model")
            _require_no_names(skeleton.weight_names() - model.keys(), "the model lacks", "of the checkpoint")
        state: dict[str, Any] = {
            "state_dict": {name: value for name, value in model.items() if name in skeleton.weight_names()},
            "optimizer_states": {},
        }
        optimizers = self._get_restored_optimizers()
        if optimizers and (count := skeleton.optimizer_count) != len(optimizers):
            raise LoadFailed(
                "the checkpoint has weights only, and training needs the state of optimizers: load it without "
                "ckpt_path, or resume from one that was saved without save_weights_only" if count is None
                else f"the checkpoint has {count} optimizer(s), the model {len(optimizers)}"
            )
        for number, optimizer in enumerate(optimizers):
            moment_keys = skeleton.moment_keys(number)
            with require_gradients(self.model, {name for name, _ in moment_keys}):
                own_state = self._get_optimizer_state(optimizer)["state"]
            _require_no_names(
                {f"{name}.{key}" for name, key in moment_keys if key not in own_state.get(name, ())},
                f"optimizer {number} lacks", "of the checkpoint (an optimizer that is made of named_parameters() has "
                "names in any checkpoint; one that has stepped has no state of parameters that were frozen)",
            )
            moments: dict[str, dict[str, Any]] = {}
            for name, key in moment_keys:
                moments.setdefault(name, {})[key] = own_state[name][key]
            state["optimizer_states"][str(number)] = {"state": moments}
        return {key: value for key, value in state.items() if value}

    def _apply_loaded(self, state: dict[str, Any], skeleton: CheckpointSkeleton) -> None:
        """Apply the loaded tensors to model and optimizers."""
        assert self.model is not None and self.lightning_module is not None
        options = StateDictOptions(strict=self.lightning_module.strict_loading)
        with in_user_code(loads_module=True):
            set_model_state_dict(self.model, {**state.get("state_dict", {}), **skeleton.extra_state()}, options=options)
        for number, optimizer in enumerate(self._get_restored_optimizers()):
            moments = state["optimizer_states"][str(number)]["state"]
            optimizer_state = skeleton.build_optimizer_state(number, moments)
            own_state = self._get_optimizer_state(optimizer)["state"]  # includes parameters without a step so far
            optimizer_state["state"] = {**own_state, **optimizer_state["state"]}
            with in_user_code():
                set_optimizer_state(self.model, optimizer, optimizer_state)

    def _get_restored_optimizers(self) -> list[Any]:
        """Return the optimizers to restore; none in an evaluation, even if an earlier training left some."""
        assert self.lightning_module is not None
        return list(self.optimizers) if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []

    def _get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return get_optimizer_state(self.model, optimizer)


def _load_skeleton(directory: Path) -> CheckpointSkeleton:
    """Return the skeleton of a checkpoint; each rank reads it by itself."""
    with Checkpoint(directory) as checkpoint:
        is_lightning = "lightning.checkpoint" in checkpoint.index["objects"]
    state: dict[str, Any] = {"lightning": {}} if is_lightning else {"lightning": None}
    if is_lightning:
        load(state, directory, no_dist=True)
    return pop_skeleton(state)


def _require_no_names(names: Collection[str], problem: str, owner: str) -> None:
    """Raise `LoadFailed` if there are missing or unexpected names."""
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LoadFailed(f"{problem} '{min(names)}'{others} {owner}")
