"""Compressed checkpoints for Hugging Face's Trainer.

    trainer = dsq_ckpt.integrations.huggingface.attach(Trainer(model, arguments, train_dataset=data))
    trainer.train(resume_from_checkpoint=...)

A directory such as `checkpoint-500/` then stores model and optimizer in a compressed checkpoint, in place of
`model.safetensors` and `optimizer.pt`. All other files are Trainer's own.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from dsq_ckpt.api.checks import unwrap_optimizer
from dsq_ckpt.api.saving import ConfigLike, as_config
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect, expect_flags, expect_on_save
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.notices import warn, warn_safely
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError, LoadFailed, described
from dsq_ckpt.integrations.mixins import add_mixin
from dsq_ckpt.integrations.staged_checkpoint import StagedCheckpoint, is_compressed_on_all_ranks
from dsq_ckpt.integrations.training_state import TrainingState

__all__ = ["attach"]

_WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin", "*.index.json")


def attach(
    trainer: Trainer, config: ConfigLike = None, *, on_save: OnSave | None = None, asynchronous: bool = False
) -> Trainer:
    """Let a trainer save and load compressed checkpoints; call it before `trainer.train`.

    Args:
        trainer: a `Trainer`, or an instance of a subclass.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        on_save: function that is called with the `SaveResult` of each checkpoint on rank 0, such as for a logger.
        asynchronous: save in the background. Training continues as soon as the state is copied or quantized; the next
            save and the end of `train` wait for the previous save, and raise its error.

    Returns:
        The same trainer.

    Raises:
        ConfigError: the configuration is invalid, or the trainer uses an unsupported feature: PEFT, DeepSpeed (which
            has an integration of its own), FSDP1, `save_on_each_node`, or pushes of checkpoints.
    """
    expect("trainer", trainer, Trainer, "a transformers.Trainer: attach(trainer)")
    expect_on_save(on_save)
    expect_flags(asynchronous=asynchronous)
    parsed_config = as_config(config)
    _check_supported(trainer)
    extended = add_mixin(trainer, DSQTrainer)
    extended.dsq_config, extended.dsq_on_save, extended.dsq_asynchronous = parsed_config, on_save, asynchronous
    return extended


class DSQTrainer(Trainer):
    """A `Trainer` whose checkpoints are compressed; `attach` converts any trainer to one.

    It overrides the methods of Trainer that write and read parts of a checkpoint. Trainer still decides when to save,
    and which checkpoints to remove.
    """

    dsq_config: DSQConfig | None = None
    """Configuration; None for the defaults."""
    dsq_on_save: OnSave | None = None
    """Function that is called with the `SaveResult` of each checkpoint on rank 0."""
    dsq_asynchronous = False
    """Whether a thread completes checkpoints while training continues."""
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _staged: StagedCheckpoint | None = None
    _pending_save: Future[None] | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, and wait for the save in the background at the end.

        Raises:
            DSQError: the last save failed.
        """
        try:
            output = super().train(*args, **kwargs)
        except BaseException:
            if self._pending_save is not None and (failure := self._pending_save.exception()) is not None:
                warn_safely(f"the last save in the background failed too: {described(failure)}")
            self._pending_save = None
            raise
        self._wait_for_save()
        return output

    def _wait_for_save(self) -> None:
        """Wait until the save in the background is complete.

        Raises:
            DSQError: the save failed.
        """
        pending, self._pending_save = self._pending_save, None  # a failure is raised once
        if pending is not None:
            pending.result()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._wait_for_save()  # Trainer loads the best checkpoint, and removes others
        return super()._finalize_training(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint; Trainer writes all of its files to a hidden directory without other checkpoints.

        So it removes no old checkpoints, which must be kept until the new checkpoint is complete.
        """
        self._wait_for_save()
        run_directory = self._get_output_dir(trial)
        target = os.path.join(run_directory, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        config, save = self.dsq_config or DSQConfig(), super()._save_checkpoint
        self._staged = staged = StagedCheckpoint(target, config, self.dsq_on_save, self.dsq_asynchronous)

        def save_files() -> None:
            save(model, trial)
            if not staged.is_saved:
                raise ConfigError(
                    f"'{target}': the trainer's class overrides _save_checkpoint without a call of Trainer's, so there "
                    "is nothing to compress; call super()._save_checkpoint in it, or use the trainer without attach"
                )

        try:
            run_on_all_ranks(communicator(None), save_files)
            if self.state.best_global_step:  # Trainer looked for this checkpoint in the hidden directory
                best_checkpoint = os.path.join(run_directory, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
                if self._is_best() or os.path.exists(best_checkpoint):
                    self.state.best_model_checkpoint = best_checkpoint
            staged.write(self._write_trainer_state)
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint

            def remove_old_checkpoints() -> None:
                rotate_checkpoints(run_directory, limit, best, use_mtime=True)

            if self.dsq_asynchronous:
                self._pending_save = staged.publish_in_background(remove_old_checkpoints)
            else:
                staged.publish(remove_old_checkpoints)
        except BaseException as error:
            staged.__exit__(type(error), error, None)
            raise
        finally:
            self._staged = None
        if self.control.should_training_stop:  # on SIGTERM, enable_jit_checkpoint expects a complete checkpoint
            self._wait_for_save()

    def _get_output_dir(self, trial: Any) -> str:
        if self._staged is not None:
            return str(self._staged.files_directory.parent)
        directory: str = super()._get_output_dir(trial)
        return directory

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, as Trainer does; within a checkpoint, save it with the optimizer."""
        if self._staged is None or not _internal_call:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        _check_supported(self)
        state = TrainingState([self.model], [] if self.args.save_only_model else [self._unwrap_optimizer()])
        self._staged.save(state.collect, model=self.model, pinned=self._is_best())
        self._staged.write(self._write_model_files)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._staged is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return

        def write(directory: Path) -> None:
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)

        self._staged.write(write)

    def _save_scaler(self, output_dir: str) -> None:
        save = super()._save_scaler
        if self._staged is None:
            save(output_dir)
        else:
            self._staged.write(lambda directory: save(str(directory)))

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state
        if self._staged is None:
            save(output_dir)
        else:
            self._staged.write(lambda directory: save(str(directory)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_compressed_on_all_ranks(resume_from_checkpoint):
            _check_supported(self)
            TrainingState([self.model if model is None else model]).restore(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_compressed_on_all_ranks(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        TrainingState([self.model], [self._unwrap_optimizer()]).restore(checkpoint, quiet=True)
        scheduler = Path(checkpoint, SCHEDULER_NAME)

        def load_scheduler() -> None:
            if not scheduler.is_file():
                raise LoadFailed(f"'{scheduler}' is missing, so the learning rate would start anew; load another one")
            state = torch.load(scheduler, weights_only=True)
            with in_user_code():
                self.lr_scheduler.load_state_dict(state)

        run_on_all_ranks(communicator(None), load_scheduler, LoadFailed)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and is_compressed_on_all_ranks(checkpoint):
            name = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
            if not Path(checkpoint, name).is_file():
                warn(
                    f"'{checkpoint}' has no {name}, as after a change in the number of ranks: dropout and other random "
                    "choices are not those of the run that saved it"
                )
        super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and is_compressed_on_all_ranks(best):
            TrainingState([self.model]).restore(best)
        else:
            super()._load_best_model()

    def _unwrap_optimizer(self) -> Optimizer:
        return unwrap_optimizer(self.optimizer)  # Accelerate wraps it

    def _is_best(self) -> bool:
        return self.state.best_global_step is not None and self.state.best_global_step == self.state.global_step

    def _write_model_files(self, directory: Path) -> None:
        """Write the files that Trainer stores beside weights: configuration, tokenizer and arguments."""
        if self.args.should_save:
            self._save(str(directory), state_dict={})
            for pattern in _WEIGHT_PATTERNS:  # files of the empty state dict
                for file in directory.glob(pattern):
                    file.unlink()

    def _write_trainer_state(self, directory: Path) -> None:
        if self.args.should_save:
            self.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))


def _check_supported(trainer: Trainer) -> None:
    """Check that a trainer can be saved completely.

    Raises:
        ConfigError: the trainer uses an unsupported feature.
    """
    arguments = trainer.args
    model = trainer.model
    reason = None
    if getattr(trainer, "is_deepspeed_enabled", False):
        reason = "DeepSpeed saves by itself: put the block dsq_checkpoint into its configuration (docs/deepspeed.md)"
    elif getattr(trainer, "is_fsdp_enabled", False) and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        reason = 'FSDP1 is not supported: set fsdp_config={"fsdp_version": 2}, or the fsdp_version of Accelerate'
    elif getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        reason = "PEFT's adapters are not supported: Trainer's own checkpoints have the adapters alone and are small"
    elif arguments.save_on_each_node:
        reason = "save_on_each_node is not supported: a checkpoint is one directory, which all nodes share"
    elif arguments.push_to_hub and arguments.hub_strategy != "end":
        reason = (
            f"hub_strategy='{getattr(arguments.hub_strategy, 'value', arguments.hub_strategy)}' pushes weights out of "
            "checkpoints, which are compressed: set hub_strategy='end', which pushes the final model"
        )
    if reason is not None:
        raise ConfigError(reason)
