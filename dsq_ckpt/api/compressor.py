"""`Compressor`: checkpoints of a training loop, each at the smallest size that keeps the model's quality."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dsq_ckpt.api.checks import (
    check_parameters,
    check_search,
    check_step,
    explain_step_failure,
    find_stepping_optimizer,
    guard_optimizer,
    unwrap_optimizer,
)
from dsq_ckpt.api.excluded_weights import ExcludedWeights, join_ranks
from dsq_ckpt.api.loading import load_with_modules
from dsq_ckpt.api.module_placeholders import load_model_state
from dsq_ckpt.api.optimizer_state import get_optimizer_state, set_optimizer_state
from dsq_ckpt.api.parameter_groups import restore_groups
from dsq_ckpt.api.saving import ConfigLike, as_config, async_save_with_writer, save_with_writer
from dsq_ckpt.api.state_matching import StateMatch, initialize_for_load, keep_uninitialized, match_saved_state
from dsq_ckpt.api.stateful import refuse_uninitialized
from dsq_ckpt.codebooks import CodebookConfig
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.arguments import (
    expect,
    expect_extra,
    expect_flags,
    expect_folds,
    expect_on_save,
    expect_path,
    format_value,
)
from dsq_ckpt.core.interrupts import hold_signals, in_user_code
from dsq_ckpt.core.sampled_checksums import SampleSum
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.distributed.comm import SingleProcess, communicator, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.engine.result import OnSave, SaveResult
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.gradients.sensitivity import GradientAverage, get_named_parameters
from dsq_ckpt.quantization.groups import is_lossy
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.search.folds import check_same_functions
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.refinement import RefinementOption


class Compressor:
    """Compressed checkpoints of a model and its optimizer, with a search of the configuration of each.

    Works in a single process and under DDP and FSDP2; create it after wrapping the model. With `evaluate`, each save
    searches the smallest configuration whose degradation is within the bound of `config.search`; without it, `config`
    is used unchanged. If the configuration weighs gradients that the optimizer does not keep, the gradients of the
    batches before a checkpoint are averaged (`GradientAverage`), by hooks or by `after_backward`.

    Args:
        model: the module that is saved and evaluated.
        optimizer: optimizer of the model; None: only the model is saved.
        config: as for `dsq_ckpt.save`; `system` chooses the search space.
        evaluate: returns the metric (a loss, unless `search.higher_is_better`) of the model in its current state, on
            the same few batches at every call. It is called on all ranks together, and their results are averaged.
        check: returns the same metric on other batches. A search may overfit the batches of `evaluate`; with `check`,
            the chosen configuration must be within the bound on both, at two more evaluations per save.
        frozen: save parameters that need no gradient too. False: checkpoints do not contain them, and a load leaves
            those of the model unchanged, except those that the checkpoint has because they were trained; for adapters
            on a model that is stored elsewhere. A load warns if weights left out are not those of the save.
        every: steps between checkpoints, if they are regular: gradients are averaged only before a checkpoint.
        hooks: "step": gradients are read at the optimizer's step; "backward": for optimizers that run inside
            backward; "manual": the training loop calls `after_backward`, after unscaling and clipping.
        process_group: ranks that save; None: all.
        history: committed checkpoints among which saves choose their parents; None: those of the process.
        on_save: called with the `SaveResult` of each save, as by `dsq_ckpt.save`.

    Raises:
        ConfigError: the configuration is invalid, a parameter of the optimizer is not one of the model's, or the
            optimizer is of a kind that cannot be restored.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch = torch.randn(32, 64)
        >>> def loss():
        ...     return (model(batch) - batch).square().mean()
        >>> compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: loss().item())
        >>> for step in range(1, 11):
        ...     optimizer.zero_grad()
        ...     loss().backward()
        ...     optimizer.step()
        >>> result = compressor.save("run/step-000010", extra={"step": 10})
        >>> compressor.load(dsq_ckpt.latest("run"), extra={"step": 0})
        {'step': 10}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        config: ConfigLike = None,
        evaluate: Callable[[], float] | None = None,
        *,
        check: Callable[[], float] | None = None,
        frozen: bool = True,
        every: int | None = None,
        hooks: Literal["step", "backward", "manual"] = "step",
        process_group: dist.ProcessGroup | None = None,
        history: SaveHistory | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        expect("model", model, nn.Module, "a module: Compressor(model, optimizer)")
        expect("optimizer", optimizer, Optimizer | None, "an optimizer, or None: Compressor(model, optimizer)")
        expect_folds(evaluate, check)
        expect_flags(frozen=frozen)
        expect("every", every, int | None, "a number of steps")
        expect("history", history, SaveHistory | None, "a SaveHistory")
        expect_on_save(on_save)
        if hooks not in ("step", "backward", "manual"):
            raise ConfigError(f"hooks is {format_value(hooks)}, expected 'step', 'backward' or 'manual'")
        if optimizer is not None:
            optimizer = unwrap_optimizer(optimizer)
            check_step(optimizer)
        self.config = as_config(config)
        if is_lossy(self.config):
            warmup.start()
        self.model, self.optimizer = model, optimizer
        self._frozen, self._excluded = frozen, ExcludedWeights(model, frozen)
        self.quality: dict[str, Any] | None = None
        """Measurements of the last search, as in the checkpoint's manifest."""
        self._group = process_group
        self._history, self._on_save = history, on_save
        self._hooks = hooks
        self._functions = evaluate, check
        if optimizer is not None:
            evaluate = guard_optimizer(evaluate, "evaluate", optimizer)
            check = guard_optimizer(check, "check", optimizer)
        self._manager = None if evaluate is None else ConfigManager(model, evaluate, check=check)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:  # after an evaluation the root module keeps its parameters unsharded
            module.reshard()
        if evaluate is not None:
            check_search(self.config, bool(sharded))
        parameters = get_named_parameters(model)
        if optimizer is not None:
            check_parameters(optimizer, parameters)
        self._average: GradientAverage | None = None
        stepping = None if optimizer is None else find_stepping_optimizer(optimizer)
        if stepping is not None and _needs_gradients(self.config, stepping):
            self._average = GradientAverage(parameters, self.config.search.beta, self.config.search.window, every=every)
            if hooks == "backward":
                self._average.attach_to_parameters()
            else:
                self._average.attach(stepping, capture=hooks)

    def __enter__(self) -> Compressor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        if self._average is not None:
            self._average.detach()

    def after_backward(self) -> None:
        """Read the gradients, with `hooks="manual"`: call it when they are unscaled and clipped, before the step."""
        if self._average is not None and self._hooks == "manual":
            self._average.capture()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state dict that `save` stores: `model`, `optimizer`, and the entries of `extra`.

        With `frozen=False`, a rank whose part of the model is frozen as a whole has no `model` in it.

        Args:
            extra: other state, such as the step. Its keys must not be `model` or `optimizer`.

        Raises:
            ConfigError: `extra` is not a dict, has one of these keys, or a parameter is uninitialized (lazy); the
                optimizer has parameters that the model does not; or nothing of the model would be saved.
        """
        with keep_uninitialized(self.optimizer):
            state = self._state(extra)
        if not state["model"] and self._excluded.names:
            if communicator(self._group).size == 1:
                self._excluded.check_others({}, SingleProcess())
            del state["model"]  # other ranks have entries there, and a load would fill the empty dict with them
        return state

    def _state(self, extra: dict[str, Any] | None, trained: Collection[str] = ()) -> dict[str, Any]:
        expect_extra(extra)
        refuse_uninitialized(self.model)
        extra = dict(extra or {})
        reserved = sorted({"model", "optimizer"} & set(extra))
        if reserved:
            raise ConfigError(f"extra has the key '{reserved[0]}', which the compressor fills itself; choose another")
        with in_user_code():  # hooks of modules and optimizers
            state = {"model": self._excluded.select_others(get_model_state_dict(self.model), trained)}
            if self.optimizer is not None:
                # Parameters may have been replaced; FSDP2 has resharded its own for the model's state dict.
                check_parameters(self.optimizer, get_named_parameters(self.model))
                state["optimizer"] = get_optimizer_state(self.model, self.optimizer)
        return {**state, **extra}

    @hold_signals()
    def save(
        self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None, *, overwrite: bool = False,
        pinned: bool = False, background: bool = False,
    ) -> SaveResult | Future[SaveResult]:
        """Search, quantize and save; collective.

        Args:
            path: the checkpoint directory.
            extra: other state to save, e.g. the step or the state of a scheduler.
            overwrite: replace a complete checkpoint at `path`.
            pinned: never drop its refinement layer.
            background: return when the search is done or the state is copied (`async_save`); a thread does the rest.

        Returns:
            The result, as `dsq_ckpt.save` returns it; with `background` a future of it, whose `result()` raises the
            error of a save that failed.

        Raises:
            CheckpointExists: a complete checkpoint is at `path`; before the search, and as SaveFailed on other ranks.
            SaveFailed: not all ranks have `evaluate`, or not all have `check`; on all ranks.
            DSQError: any other failure, on every rank; earlier checkpoints and the model are unchanged.
        """
        manager = self._manager
        writer: DSQStorageWriter

        def prepare_checks() -> dict[str, SampleSum]:
            expect_path("path", path)
            expect_flags(overwrite=overwrite, pinned=pinned, background=background)
            expect_extra(extra)
            return self._excluded.sum_samples()

        comm = communicator(self._group)
        sums = check_same_functions(*self._functions, comm, prepare_checks)

        def prepare_save() -> tuple[DSQStorageWriter, dict[str, Any]]:
            nonlocal writer
            inputs = CompressorInputs(
                plan_as_configured if manager is None else manager, self._gradients(), fractions_of(self.config),
                None if self._frozen else join_ranks(sums),
            )
            writer = DSQStorageWriter(
                path, self.config, overwrite=overwrite, model=self.model, process_group=self._group, pinned=pinned,
                history=self._history, on_save=self._on_save, inputs=inputs,
            )
            self._excluded.warn_of_trained(self.optimizer)
            state = self.state(extra)
            self._excluded.check_others(state.get("model", {}), comm)
            return writer, state

        result: SaveResult | Future[SaveResult]
        if background:
            result = async_save_with_writer(prepare_save, process_group=self._group)
        else:
            result = save_with_writer(prepare_save, process_group=self._group, staged=manager is not None)
        self.quality = writer.quality
        if self._average is not None:
            self._average.reset()
        return result

    @hold_signals()
    def load(
        self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None, *,
        refinement: RefinementOption = "auto",
        allow_cast: bool = False,
    ) -> dict[str, Any]:
        """Restore model, optimizer and search, in place; collective.

        Args:
            path: a complete checkpoint.
            extra: placeholders for the saved `extra`, by its keys; tensors are filled in place. An empty dict is filled
                with everything that was saved there, if it is plain data. A warning names saved keys without a
                placeholder.
            refinement: True: require the refinement layer; False: load the base layer alone; "auto": load the
                refinement layer where it was kept, and warn where it was not.
            allow_cast: load into a model of another dtype than the saved one, such as float32 after bfloat16.

        Returns:
            The filled `extra`.

        Raises:
            CheckpointNotFound: there is no checkpoint at `path`, or `path` is None (as `latest` returns without one).
            DSQError: any other failure, on every rank.
        """
        comm = communicator(self._group)

        def prepare_load() -> tuple[dict[str, Any], StateMatch, set[str]]:
            expect_flags(allow_cast=allow_cast)
            expect_extra(extra)
            trained = self._excluded.find_trained(path)
            with explain_step_failure(self.optimizer):
                state = self._state(extra, trained)
            self._excluded.check_others(state["model"], comm)
            match = match_saved_state(
                path, state, self.model, self.optimizer, get_named_parameters(self.model), self._frozen, comm
            )
            self._excluded.warn_of_changes(match.directory, comm)
            return state, match, self._excluded.names - trained

        def apply_load() -> None:
            offered_keys = state["model"].keys() - expected_keys
            load_model_state(self.model, state["model"], offered_keys, match.directory, self._frozen, comm)
            self._apply_loaded(state, match, refinement is not False)

        with initialize_for_load(self.optimizer):
            state, match, excluded_keys = run_on_all_ranks(comm, prepare_load, LoadFailed)
            expected_keys = set(state["model"])
            load_with_modules(
                state, path, plain_paths=match.plain_paths, modules={("model",): self.model}, refinement=refinement,
                excluded_keys=excluded_keys, allow_cast=allow_cast, process_group=self._group, history=self._history,
            )
            run_on_all_ranks(comm, apply_load, LoadFailed)
        if self._average is not None:
            self._average.reset()
        return {key: value for key, value in state.items() if key not in ("model", "optimizer")}

    def _apply_loaded(self, state: dict[str, Any], match: StateMatch, refined: bool) -> None:
        """Load the state into optimizer and search."""
        if self.optimizer is not None:
            optimizer = state["optimizer"]
            if match.groups is not None:
                optimizer["param_groups"] = match.groups.from_saved_order(optimizer["param_groups"])
            options = StateDictOptions(strict=False)  # some parameters may have no saved state
            with restore_groups(self.optimizer, optimizer["param_groups"]) as groups, in_user_code():
                optimizer["param_groups"] = groups
                set_optimizer_state(self.model, self.optimizer, optimizer, options)
        if self._manager is not None:
            self._manager.resume(Manifest.read(match.directory), refined=refined)

    def _gradients(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        names = get_named_parameters(self.model)
        averages = {name: self._average.average(name) for name in names if name in self._average}
        return {name: average for name, average in averages.items() if average is not None}


def _codebooks(config: DSQConfig) -> Iterable[CodebookConfig]:
    quantize = config.quantize
    return [tensor.codebook for tensor in (quantize.weights, *quantize.groups.values()) if tensor.method == "quantize"]


def weighs_elements(config: DSQConfig) -> bool:
    """Return whether the codebook of a tensor weighs each element by its gradient."""
    return any(book.weighing is not None for book in _codebooks(config))


def _needs_gradients(config: DSQConfig, optimizer: Optimizer) -> bool:
    """Return whether to average gradients: to weigh elements, or to fit steps if no moment tracks gradient sizes."""
    # Not by its defaults, which an optimizer around another one may lack, as PostLocalSGDOptimizer of PyTorch.
    has_moments = all("betas" in group or group.get("momentum", 0) > 0 for group in optimizer.param_groups)
    return weighs_elements(config) or any(book.gradient_power > 0 and not has_moments for book in _codebooks(config))


def fractions_of(config: DSQConfig) -> Fractions:
    """Return the fractions of elements that configurations of the search space may prune or protect."""
    space = SYSTEMS[config.system].space
    weighing_axes = [
        axis for axis in (space.axes if space is not None else ())
        if any(key.endswith((".prune", ".protect")) for key in axis.path)
    ]
    configs = [config] + [
        config.with_values(**dict.fromkeys(axis.path, value)) for axis in weighing_axes for value in axis.values
    ]
    weighings = [book.weighing for variant in configs for book in _codebooks(variant) if book.weighing is not None]
    prune, protect = {weighing.prune for weighing in weighings}, {weighing.protect for weighing in weighings}
    return Fractions(tuple(sorted(prune)), tuple(sorted(protect)))
