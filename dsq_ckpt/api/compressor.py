"""`Compressor`: checkpoints of a training loop, each at the smallest size that keeps the model's quality."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dsq_ckpt.api.asking import Found, as_it_is, ask_for_saved, given_back
from dsq_ckpt.api.buffers import give_model
from dsq_ckpt.api.checks import check_owner, check_search, check_step, made_by_step, unwrapped
from dsq_ckpt.api.loading import load_with
from dsq_ckpt.api.optimizer_state import get_optimizer_state, set_optimizer_state
from dsq_ckpt.api.parameter_groups import filled_groups
from dsq_ckpt.api.saving import ConfigLike, as_config, save_async_with, save_with
from dsq_ckpt.api.stateful import refuse_uninitialized
from dsq_ckpt.codebooks import CodebookConfig
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.arguments import expect, expect_extra, expect_folds, expect_on_save, expect_path, shown
from dsq_ckpt.core.interrupts import held_signals, in_users_function
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.result import OnSave, SaveResult
from dsq_ckpt.errors import ConfigError, LoadFailed
from dsq_ckpt.gradients.sensitivity import GradientAverage, names_of
from dsq_ckpt.quantization.groups import is_lossy
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import as_configured
from dsq_ckpt.search.folds import agree
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.search.trial import ModelChanged
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.refinement import Refinement


class Compressor:
    """Saves a model and its optimizer, compressed; searches the configuration of each checkpoint.

    Works in a single process and under DDP and FSDP2; make it after wrapping. With `evaluate`, each save finds the
    smallest configuration whose degradation keeps to `config.search`; without it the configuration is taken as it is.
    Where the configuration weighs gradients that the optimizer does not keep, they are averaged in the batches before
    a checkpoint (`GradientAverage`), by hooks, or by `after_backward`.

    Args:
        model: to be saved, and evaluated.
        optimizer: optimizer of the model; None: only the model is saved.
        config: as for `dsq_ckpt.save`; `system` chooses the search space.
        evaluate: the metric (a loss, by default: `search.higher_is_better`) of the model as it is now, on a few batches
            that are always the same. It is called on all ranks together, and ranks' results are averaged.
        check: the same metric on other batches. A search may fit the batches that it looks at; with `check`, what it
            chooses by `evaluate` has to keep its bounds on these too, for two evaluations more per save.
        frozen: save parameters that need no gradient too. False: they are left out of checkpoints, and a load leaves
            those of the model as they are; for adapters on a model that is stored elsewhere.
        every: steps between checkpoints, if that is regular: gradients are averaged only before them.
        hooks: "step": gradients are read at the optimizer's step; "backward": for optimizers that run inside
            backward; "manual": `after_backward` is called in the loop, after unscaling and clipping.
        process_group: ranks that save; None: all.
        history: checkpoints that saves may come after; None: those of the process.
        on_save: called with the `SaveResult` of each save, as by `dsq_ckpt.save`.

    Raises:
        ConfigError: the configuration is wrong, the optimizer's parameters are not the model's, or it is of a
            kind that cannot be restored.

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
        expect("frozen", frozen, bool, "True or False")
        expect("every", every, int | None, "a number of steps")
        expect("history", history, SaveHistory | None, "a SaveHistory")
        expect_on_save(on_save)
        if hooks not in ("step", "backward", "manual"):
            raise ConfigError(f"hooks is {shown(hooks)}, expected 'step', 'backward' or 'manual'")
        if optimizer is not None:
            optimizer = unwrapped(optimizer)
            check_step(optimizer)
        self.config = as_config(config)
        if is_lossy(self.config):
            warmup.start()
        self.model, self.optimizer = model, optimizer
        self._frozen = frozen
        self.quality: dict[str, Any] | None = None
        """What the last search measured; it is in the checkpoint's manifest too."""
        self._group = process_group
        self._history, self._on_save = history, on_save
        self._hooks = hooks
        self._functions = evaluate, check
        if optimizer is not None:
            evaluate, check = _watched(evaluate, "evaluate", optimizer), _watched(check, "check", optimizer)
        self._manager = None if evaluate is None else ConfigManager(model, evaluate, check=check)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:  # after an evaluation the root still has gathered parameters in place of its own
            module.reshard()
        if evaluate is not None:
            check_search(self.config, bool(sharded))
        parameters = names_of(model)
        if optimizer is not None:
            check_owner(optimizer, parameters)
        self._average: GradientAverage | None = None
        if optimizer is not None and _needs_gradients(self.config, optimizer):
            self._average = GradientAverage(parameters, self.config.search.beta, self.config.search.window, every=every)
            if hooks == "backward":
                self._average.attach_to_parameters()
            else:
                self._average.attach(optimizer, capture=hooks)

    def __enter__(self) -> Compressor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        if self._average is not None:
            self._average.detach()

    def after_backward(self) -> None:
        """With `hooks="manual"`: gradients are there, unscaled and clipped, and the optimizer has not stepped yet."""
        if self._average is not None and self._hooks == "manual":
            self._average.capture()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state dict that is saved: `model`, `optimizer`, and the entries of `extra`."""
        with as_it_is(self.optimizer):
            return self._state(extra)

    def _state(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        expect_extra(extra)
        refuse_uninitialized(self.model)
        extra = dict(extra or {})
        taken = sorted({"model", "optimizer"} & set(extra))
        if taken:
            raise ConfigError(f"extra has the key '{taken[0]}', which the compressor fills itself; choose another")
        with in_users_function():  # hooks of modules and optimizers
            state = {"model": self._chosen(get_model_state_dict(self.model))}
            if self.optimizer is not None:
                state["optimizer"] = get_optimizer_state(self.model, self.optimizer)
        return {**state, **extra}

    @held_signals()
    def save(
        self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None, *, overwrite: bool = False,
        pinned: bool = False, background: bool = False,
    ) -> SaveResult | Future[SaveResult]:
        """Search, quantize, save; collective.

        Args:
            path: the checkpoint directory.
            extra: more to save, e.g. the step or the state of a scheduler.
            overwrite: replace a complete checkpoint at `path`.
            pinned: keep its refinement layer for good.
            background: return when the search is done, or the state is copied (see `async_save`); the rest follows in
                a thread.

        Returns:
            What was written, as of `dsq_ckpt.save`; with `background` a future of it, whose `result()` raises what the
            save raised.

        Raises:
            CheckpointExists: a complete checkpoint is at `path`; before the search, and as SaveFailed on other ranks.
            SaveFailed: ranks have other functions than each other; on all ranks.
            DSQError: what else failed, on every rank; earlier checkpoints are untouched, and so is the model.
        """
        manager = self._manager

        def made() -> DSQStorageWriter:
            expect_path("path", path)
            expect_extra(extra)
            return DSQStorageWriter(
                path, self.config, overwrite=overwrite, model=self.model, process_group=self._group, pinned=pinned,
                policy=as_configured if manager is None else manager, gradients=self._gradients(),
                fractions=fractions_of(self.config), history=self._history, on_save=self._on_save,
            )

        writer = agree(*self._functions, communicator(self._group), made)

        def begin() -> tuple[DSQStorageWriter, dict[str, Any]]:
            self._tell_of_left_out()
            return writer, self.state(extra)

        saved: SaveResult | Future[SaveResult]
        if background:
            saved = save_async_with(begin, process_group=self._group)
        else:
            saved = save_with(begin, process_group=self._group, staged=manager is not None)
        self.quality = writer.quality
        if self._average is not None:
            self._average.reset()
        return saved

    @held_signals()
    def load(
        self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None, *, refinement: Refinement = "auto",
        allow_cast: bool = False,
    ) -> dict[str, Any]:
        """Restore model and optimizer, in place, and go on from there; collective.

        Args:
            path: a complete checkpoint.
            extra: what else was saved, as placeholders of the same keys; filled in place where they are tensors. An
                empty dict is filled with all that was saved in its place, if that is plain data. A warning names what
                was saved and has no placeholder.
            refinement: True: the refinement layer is needed; False: the base layer alone; "auto": where it was kept,
                with a warning where it was not.
            allow_cast: load into a model of another dtype than was saved, such as float32 after bfloat16.

        Returns:
            The filled `extra`.

        Raises:
            CheckpointNotFound: nothing is at `path`, or it is None, as of `latest` where there is no checkpoint.
            DSQError: what else failed, on every rank.
        """
        comm = communicator(self._group)

        def asked() -> tuple[dict[str, Any], Found, set[str]]:
            with made_by_step(self.optimizer):
                state = self._state(extra)
            found = ask_for_saved(path, state, self.model, names_of(self.model), self._frozen, comm)
            return state, found, self._left_out()

        def given() -> None:
            offered = state["model"].keys() - told
            give_model(self.model, state["model"], offered, found.directory, self._frozen, comm)
            self._take(state, found, refinement is not False)

        with given_back(self.optimizer):
            state, found, left_out = run_on_all_ranks(comm, asked, LoadFailed)
            told = set(state["model"])
            load_with(
                state, path, plain=found.plain, modules={("model",): self.model}, left_out=left_out,
                refinement=refinement, allow_cast=allow_cast, process_group=self._group, history=self._history,
            )
            run_on_all_ranks(comm, given, LoadFailed)
        if self._average is not None:
            self._average.reset()
        return {key: value for key, value in state.items() if key not in ("model", "optimizer")}

    def _take(self, state: dict[str, Any], found: Found, refined: bool) -> None:
        """Give loaded state to optimizer and search."""
        if self.optimizer is not None:
            optimizer = state["optimizer"]
            if found.groups is not None:
                optimizer["param_groups"] = found.groups.restored(optimizer["param_groups"])
            options = StateDictOptions(strict=False)  # of some parameters nothing was saved
            with filled_groups(self.optimizer, optimizer["param_groups"]) as groups, in_users_function():
                optimizer["param_groups"] = groups
                set_optimizer_state(self.model, self.optimizer, optimizer, options)
        if self._manager is not None:
            self._manager.resume(Manifest.read(found.directory), refined=refined)

    def _chosen(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the model's state dict that are saved; torch's own option keeps tied frozen ones."""
        kept = copy.copy(model)  # with the versions of modules, which a load tells them
        for name in self._left_out() & kept.keys():
            del kept[name]
        if model and not kept:  # a load would fill the empty dict with frozen weights
            raise ConfigError("frozen is False, but all of the model is frozen: there is nothing of it to save or load")
        return kept

    def _left_out(self) -> set[str]:
        """Return the names of frozen parameters, if these are not saved."""
        return {name for name, one in names_of(self.model).items() if not (one.requires_grad or self._frozen)}

    def _tell_of_left_out(self) -> None:
        """Warn of weights that are not saved though the optimizer has trained them, as of an adapter that is off."""
        known, names = getattr(self.optimizer, "state", {}), names_of(self.model)
        if trained := sorted(name for name in self._left_out() if known.get(names[name])):
            warn(
                f"weights that the optimizer has state of are not saved: {named(trained)} need no gradient at the "
                "moment, and frozen is False; turn their gradients on for saves and loads, or pass frozen=True"
            )

    def _gradients(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        names = names_of(self.model)
        found = {name: self._average.average(name) for name in names if name in self._average}
        return {name: average for name, average in found.items() if average is not None}


def _watched(
    function: Callable[[], float] | None, name: str, optimizer: Optimizer
) -> Callable[[], float] | None:
    """Return a function that fails if it changes what an optimizer consists of; values of tensors are seen elsewhere.

    The returned function raises `ModelChanged`.
    """
    if function is None:
        return None

    def watched() -> float:
        before = _outline(optimizer)
        metric = function()
        if _outline(optimizer) != before:
            raise ModelChanged(
                f"`{name}` changed the optimizer, by its hyperparameters or by what is in its state: it must leave the "
                "optimizer as it is. It was not put back: load an earlier checkpoint before training goes on; this one "
                "was not written"
            )
        return metric

    return watched


def _outline(optimizer: Optimizer) -> Any:
    """Return an optimizer's hyperparameters, and the identities of the tensors in its state."""
    def identity(value: Any) -> Any:
        if isinstance(value, Mapping):  # the state of a parameter
            return {key: identity(inner) for key, inner in value.items()}
        return id(value) if isinstance(value, torch.Tensor) else repr(value)

    return (
        [{key: identity(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        {id(parameter): identity(state) for parameter, state in optimizer.state.items()},
    )


def _codebooks(config: DSQConfig) -> Iterable[CodebookConfig]:
    quantize = config.quantize
    return [tensor.codebook for tensor in (quantize.weights, *quantize.groups.values()) if tensor.method == "quantize"]


def weighs_elements(config: DSQConfig) -> bool:
    """Return whether codebooks of weights look at the gradient of every element."""
    return any(book.weighing is not None for book in _codebooks(config))


def _needs_gradients(config: DSQConfig, optimizer: Optimizer) -> bool:
    """Return whether to average gradients: to weigh elements, or to fit steps if no moment has gradient sizes."""
    has_moments = "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
    return weighs_elements(config) or any(
        book.gradient_power > 0 and not has_moments for book in _codebooks(config)
    )


def fractions_of(config: DSQConfig) -> Fractions:
    """Return the fractions that configurations of the search space may prune or protect."""
    space = SYSTEMS[config.system].space
    weighing_axes = [
        axis for axis in (space.axes if space is not None else ())
        if any(key.endswith((".prune", ".protect")) for key in axis.path)
    ]
    configs = [config] + [
        config.with_values(**dict.fromkeys(axis.path, value)) for axis in weighing_axes for value in axis.values
    ]
    found = [book.weighing for one in configs for book in _codebooks(one) if book.weighing is not None]
    prune, protect = {weighing.prune for weighing in found}, {weighing.protect for weighing in found}
    return Fractions(tuple(sorted(prune)), tuple(sorted(protect)))
