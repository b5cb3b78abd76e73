"""Compressed checkpoints for Accelerate: `accelerator.save_state` and `accelerator.load_state`.

    accelerator = dsq_ckpt.integrations.accelerate.attach(Accelerator())

The directory of `save_state` then has models and optimizers in a compressed checkpoint. All other files are
Accelerate's own: schedulers, samplers, random numbers, and objects of `register_for_checkpointing`.
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
from dsq_ckpt.integrations.attaching import attached
from dsq_ckpt.integrations.staged import StagedCheckpoint, holds_checkpoint
from dsq_ckpt.integrations.training_state import TrainingState
from dsq_ckpt.storage.paths import resolve_local_path

_UNSUPPORTED = (DistributedType.MEGATRON_LM, DistributedType.XLA)


def attach(accelerator: Accelerator, config: ConfigLike = None, *, on_save: OnSave | None = None) -> Accelerator:
    """Let an accelerator save and load compressed checkpoints; call it before `save_state` and `load_state`.

    Args:
        accelerator: an `Accelerator`.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        on_save: called with the `SaveResult` of each checkpoint, on rank 0, for a logger.

    Returns:
        The same accelerator.

    Raises:
        ConfigError: the configuration is wrong, or the accelerator is set up for something that is not supported:
            DeepSpeed (which has an integration of its own), FSDP1, Megatron-LM, XLA, or `save_on_each_node`.
    """
    expect("accelerator", accelerator, Accelerator, "an accelerate.Accelerator: attach(accelerator)")
    expect_on_save(on_save)
    checked = as_config(config)
    _refuse(accelerator)
    made = attached(accelerator, DSQAccelerator)
    made.dsq_config, made.dsq_on_save = checked, on_save
    return made


class DSQAccelerator(Accelerator):
    """An `Accelerator` whose checkpoints are compressed; `attach` makes one of any accelerator."""

    dsq_config: DSQConfig | None = None
    """The configuration; None: the defaults."""
    dsq_on_save: OnSave | None = None
    """Called with the `SaveResult` of each checkpoint, on rank 0."""
    _models: list[nn.Module]
    _optimizers: list[Any]

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save everything that `prepare` and `register_for_checkpointing` were given; collective.

        Args:
            output_dir: the directory, which is replaced; unused with `automatic_checkpoint_naming`.
            safe_serialization: without effect: models are in the compressed checkpoint.
            save_model_func_kwargs: as in Accelerate.

        Returns:
            The directory.

        Raises:
            CheckpointExists: automatic naming leads to a checkpoint that is there.
            ConfigError: the directory is a URL; or a hook of `register_save_state_pre_hook` is there, which would see
                no models.
            DSQError: the save failed; what was saved before is untouched.
        """
        _refuse(self)
        project = self.project_configuration
        named = project.automatic_checkpoint_naming
        if not named and output_dir is None:
            raise ConfigError("save_state needs output_dir, unless automatic_checkpoint_naming is set")
        goal = resolve_local_path(
            self._checkpoints() / f"checkpoint_{self.save_iteration}" if named else str(output_dir)
        )

        def check() -> None:
            if named and goal.exists():
                raise CheckpointExists(
                    f"'{goal}' exists, and automatic naming would replace it; after a restart set "
                    "ProjectConfiguration(iteration=...) to the number of the next checkpoint"
                )

        run_on_all_ranks(communicator(None), check)
        with StagedCheckpoint(goal, self.dsq_config or DSQConfig(), self.dsq_on_save) as staged:
            state = TrainingState(self._models, self._plain_optimizers())
            staged.save(state.collect, model=state.model)
            save = super().save_state
            with self._without_models():
                staged.write(lambda path: save(str(path), safe_serialization, **save_model_func_kwargs))
            staged.publish()
        if named and project.total_limit is not None and self.is_main_process:
            others = [one for one in _numbered(goal.parent) if one != goal]  # which may have higher numbers
            for old in others[: max(len(others) + 1 - project.total_limit, 0)]:
                shutil.rmtree(old, ignore_errors=True)
        return goal

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load what `save_state` saved, compressed or plain; collective.

        Args:
            input_dir: the directory; None, with `automatic_checkpoint_naming`: the newest checkpoint.
            load_kwargs, load_model_func_kwargs: as in Accelerate.

        Raises:
            CheckpointNotFound: automatic naming finds no checkpoint.
            ConfigError: the directory is a URL; or a hook of `register_load_state_pre_hook` is there, which would see
                no models.
            DSQError: the checkpoint cannot be loaded.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            found = gather_from_all_ranks(communicator(None), lambda: _numbered(self._checkpoints()), LoadFailed)[0]
            if not found:
                raise CheckpointNotFound(f"'{self._checkpoints()}' has no checkpoint yet")
            input_dir = str(found[-1])
        if input_dir is None or not holds_checkpoint(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        _refuse(self)
        directory = str(resolve_local_path(input_dir))
        name = f"{RNG_STATE_NAME}_{self.process_index}.pkl"
        if not Path(directory, name).is_file():
            warn(
                f"'{directory}' has no {name}, as after a change in the number of ranks: dropout and other random "
                "choices are not those of the run that saved it"
            )
        TrainingState(self._models, self._plain_optimizers()).restore(directory)
        load = super().load_state
        with self._without_models():
            run_on_all_ranks(
                communicator(None), lambda: load(directory, load_kwargs, **load_model_func_kwargs), LoadFailed
            )

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """Leave to Accelerate, in the directory that it is given, all but models and optimizers."""
        project = self.project_configuration
        named, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        models, self._models = self._models, []
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._models, self._optimizers, project.automatic_checkpoint_naming = models, optimizers, named

    def _checkpoints(self) -> Path:
        return resolve_local_path(os.path.join(str(self.project_dir), "checkpoints"))

    def _plain_optimizers(self) -> list[Optimizer]:
        return [unwrap_optimizer(one) for one in self._optimizers]


def _numbered(run: Path) -> list[Path]:
    """Return the checkpoints of automatic naming, oldest first."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in run.iterdir():
            if number := re.fullmatch(r"checkpoint_(\d+)", entry.name):
                found[int(number[1])] = entry
    return [found[number] for number in sorted(found)]


def _refuse(accelerator: Accelerator) -> None:
    """Refuse what would be saved wrongly, or not at all.

    Raises:
        ConfigError: the accelerator is set up for it.
    """
    kind = accelerator.distributed_type
    reason = None
    if kind == DistributedType.DEEPSPEED:
        reason = "DeepSpeed saves by itself: put the block dsq_checkpoint into its configuration (docs/deepspeed.md)"
    elif kind in _UNSUPPORTED:
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
