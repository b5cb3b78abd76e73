"""Compressed checkpoints for Accelerate: `accelerator.save_state` and `accelerator.load_state`.

    accelerator = dsq_ckpt.integrations.accelerate.attach(Accelerator())

The directory of `save_state` then stores models and optimizers in a compressed checkpoint. All other files are
Accelerate's own: schedulers, samplers, random states, and objects of `register_for_checkpointing`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.constants import RNG_STATE_NAME
from torch import nn
from torch.optim import Optimizer

from dsq_ckpt.api.checks import unwrap_optimizer
from dsq_ckpt.api.saving import ConfigLike, as_config
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect, expect_on_save
from dsq_ckpt.core.notices import warn
from dsq_ckpt.distributed.comm import communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, ConfigError, LoadFailed
from dsq_ckpt.integrations.mixins import add_mixin
from dsq_ckpt.integrations.staged_checkpoint import StagedCheckpoint, is_compressed_on_all_ranks
from dsq_ckpt.integrations.training_state import TrainingState
from dsq_ckpt.storage.atomic_io import hidden_name
from dsq_ckpt.storage.paths import resolve_local_path

__all__ = ["attach"]

_UNSUPPORTED_TYPES = (DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(accelerator: Accelerator, config: ConfigLike = None, *, on_save: OnSave | None = None) -> Accelerator:
    """Let an accelerator save and load compressed checkpoints; call it before `save_state` and `load_state`.

    Args:
        accelerator: an `Accelerator`.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        on_save: function that is called with the `SaveResult` of each checkpoint on rank 0, such as for a logger.

    Returns:
        The same accelerator.

    Raises:
        ConfigError: the configuration is invalid, or the accelerator uses an unsupported feature: DeepSpeed (which has
            an integration of its own), FSDP1, Megatron-LM, XLA, or `save_on_each_node`.
    """
    expect("accelerator", accelerator, Accelerator, "an accelerate.Accelerator: attach(accelerator)")
    expect_on_save(on_save)
    parsed_config = as_config(config)
    _check_supported(accelerator)
    extended = add_mixin(accelerator, DSQAccelerator)
    extended.dsq_config, extended.dsq_on_save = parsed_config, on_save
    return extended


class DSQAccelerator(Accelerator):
    """An `Accelerator` whose checkpoints are compressed; `attach` converts any accelerator to one."""

    dsq_config: DSQConfig | None = None
    """Configuration; None for the defaults."""
    dsq_on_save: OnSave | None = None
    """Function that is called with the `SaveResult` of each checkpoint on rank 0."""
    _models: list[nn.Module]
    _optimizers: list[Any]

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save all objects of `prepare` and `register_for_checkpointing`; collective.

        Args:
            output_dir: directory, which is replaced; unused with `automatic_checkpoint_naming`.
            safe_serialization: no effect, since models are in the compressed checkpoint.
            save_model_func_kwargs: as in Accelerate.

        Returns:
            The directory.

        Raises:
            CheckpointExists: automatic naming chooses an existing checkpoint.
            ConfigError: the directory is a URL; or there is a hook of `register_save_state_pre_hook`, which would get
                no models.
            DSQError: the save failed; earlier checkpoints are untouched.
        """
        _check_supported(self)
        project = self.project_configuration
        automatic_naming = project.automatic_checkpoint_naming
        if not automatic_naming and output_dir is None:
            raise ConfigError("save_state needs output_dir, unless automatic_checkpoint_naming is set")
        target = resolve_local_path(
            self._get_run_directory() / f"checkpoint_{self.save_iteration}" if automatic_naming else str(output_dir)
        )

        def check_target_is_new() -> None:
            if automatic_naming and target.exists():
                raise CheckpointExists(
                    f"'{target}' exists, and automatic naming would replace it; after a restart set "
                    "ProjectConfiguration(iteration=...) to the number of the next checkpoint"
                )

        run_on_all_ranks(communicator(None), check_target_is_new)
        with StagedCheckpoint(target, self.dsq_config or DSQConfig(), self.dsq_on_save) as staged:
            state = TrainingState(self._models, self._unwrap_optimizers())
            staged.save(state.collect, model=state.model)
            save = super().save_state
            with self._hide_models_and_optimizers():
                staged.write(lambda path: save(str(path), safe_serialization, **save_model_func_kwargs))
            staged.publish()
        if automatic_naming and project.total_limit is not None and self.is_main_process:
            checkpoints = _list_numbered_checkpoints(target.parent)
            other_checkpoints = [path for path in checkpoints if path != target]  # may have higher numbers
            for old_checkpoint in other_checkpoints[: max(len(other_checkpoints) + 1 - project.total_limit, 0)]:
                _remove_checkpoint(old_checkpoint)
        return target

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a compressed or plain checkpoint of `save_state`; collective.

        Args:
            input_dir: directory; with `automatic_checkpoint_naming`, None for the newest checkpoint.
            load_kwargs, load_model_func_kwargs: as in Accelerate.

        Raises:
            CheckpointNotFound: automatic naming finds no checkpoint.
            ConfigError: the directory is a URL; or there is a hook of `register_load_state_pre_hook`, which would get
                no models.
            DSQError: the checkpoint cannot be loaded.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            checkpoints = gather_from_all_ranks(
                communicator(None), lambda: _list_numbered_checkpoints(self._get_run_directory()), LoadFailed
            )[0]
            if not checkpoints:
                raise CheckpointNotFound(f"'{self._get_run_directory()}' has no checkpoint yet")
            input_dir = str(checkpoints[-1])
        if input_dir is None or not is_compressed_on_all_ranks(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        _check_supported(self)
        directory = str(resolve_local_path(input_dir))
        name = f"{RNG_STATE_NAME}_{self.process_index}.pkl"
        if not Path(directory, name).is_file():
            warn(
                f"'{directory}' has no {name}, as after a change in the number of ranks: dropout and other random "
                "choices are not those of the run that saved it"
            )
        TrainingState(self._models, self._unwrap_optimizers()).restore(directory, has_all_optimizers=True)
        load = super().load_state
        with self._hide_models_and_optimizers():
            run_on_all_ranks(
                communicator(None), lambda: load(directory, load_kwargs, **load_model_func_kwargs), LoadFailed
            )

    @contextmanager
    def _hide_models_and_optimizers(self) -> Iterator[None]:
        """Hide models and optimizers from Accelerate in this context, and turn automatic naming off."""
        project = self.project_configuration
        automatic_naming, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        models, self._models = self._models, []
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._models, self._optimizers, project.automatic_checkpoint_naming = models, optimizers, automatic_naming

    def _get_run_directory(self) -> Path:
        return resolve_local_path(os.path.join(str(self.project_dir), "checkpoints"))

    def _unwrap_optimizers(self) -> list[Optimizer]:
        return [unwrap_optimizer(optimizer) for optimizer in self._optimizers]


def _list_numbered_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of automatic naming in ascending order of their numbers."""
    paths_by_number = {}
    with suppress(FileNotFoundError):
        for entry in run.iterdir():
            if number := re.fullmatch(r"checkpoint_(\d+)", entry.name):
                paths_by_number[int(number[1])] = entry
    return [paths_by_number[number] for number in sorted(paths_by_number)]


def _remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint as far as possible. If the process is killed meanwhile, no part of it looks like one."""
    hidden = hidden_name(checkpoint)
    with suppress(OSError):
        if not checkpoint.is_symlink():
            checkpoint.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def _check_supported(accelerator: Accelerator) -> None:
    """Check that an accelerator can be saved completely.

    Raises:
        ConfigError: the accelerator uses an unsupported feature.
    """
    kind = accelerator.distributed_type
    reason = None
    if kind == DistributedType.DEEPSPEED:
        reason = "DeepSpeed saves by itself: put the block dsq_checkpoint into its configuration (docs/deepspeed.md)"
    elif kind in _UNSUPPORTED_TYPES:
        reason = f"{kind.value} is not supported"
    elif kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        reason = "FSDP1 is not supported: set fsdp_version=2 in FullyShardedDataParallelPlugin"
    elif accelerator.project_configuration.save_on_each_node:
        reason = "save_on_each_node is not supported: a checkpoint is one directory, which all nodes share"
    elif accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        reason = (
            "hooks of register_save_state_pre_hook and register_load_state_pre_hook are not supported, since models "
            "and their weights are in the compressed checkpoint: remove them, or save what they save by itself"
        )
    if reason is not None:
        raise ConfigError(reason)
