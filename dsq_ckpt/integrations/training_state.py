"""Conversion of models and optimizers to one nested state dict by fully qualified names, and back.

Optimizers are not initialized by a step, unless only they can tell what a checkpoint's entry is: frozen or unused
parameters have no optimizer state, and get none in a restart. FSDP2's sharded tensors stay sharded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dsq_ckpt.api.checks import has_state, reset_on_failure
from dsq_ckpt.api.joined_models import join_models
from dsq_ckpt.api.loading import load
from dsq_ckpt.api.module_placeholders import ModulePlaceholders, allow_unexpected_keys, unexpected_keys_error
from dsq_ckpt.api.object_placeholders import refuse_subclass_part
from dsq_ckpt.api.optimizer_state import TORCH_KEYS, extra_entries
from dsq_ckpt.convert.export import ExportError, OpenedCheckpoint
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.hints import name_hint
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path, set_entry
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import find_class_key
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.distributed.comm import communicator, run_on_all_ranks
from dsq_ckpt.engine.chain import describe_base_loss
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.gradients.sensitivity import get_named_parameters
from dsq_ckpt.integrations.named_optimizers import (
    OwnEntries,
    create_placeholder,
    get_named_state,
    get_numbered_state,
    get_parameter_names,
    mismatch_error,
)
from dsq_ckpt.storage.refinement import RefinementOption


class _Placeholders(NamedTuple):
    """Placeholders for the tensors of a checkpoint.

    Attributes:
        tensors: state dict to load into, by flat names, since lists may have other values too.
        state: state dict with the same tensors and all other values.
        extra_keys: keys that a model may not expect, by the path of its state dict.
        warnings: warnings about differences from the checkpoint, other than the following.
        optimizer_warnings: warnings about the state of optimizers.
        refinement: refinement option of the load.
    """

    tensors: dict[str, Any]
    state: dict[str, Any]
    extra_keys: Mapping[tuple[Any, ...], Collection[str]]
    warnings: list[str]
    optimizer_warnings: list[str]
    refinement: RefinementOption


class TrainingState:
    """A state dict of models and optimizers with keys `model`, `model_1`, ..., `optimizer`, `optimizer_1`, ...

    Args:
        models: modules, wrapped and sharded as in training.
        optimizers: optimizers of the modules' parameters.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> None:
        self._models = {_create_key("model", number): model for number, model in enumerate(models)}
        self._optimizers = {_create_key("optimizer", number): optimizer for number, optimizer in enumerate(optimizers)}

    @property
    def model(self) -> nn.Module | None:
        """All models as one module, with the parameter names of the optimizers' state."""
        models = [(self._get_name_prefix(key), model) for key, model in self._models.items()]
        return join_models(models) if models else None

    def collect(self) -> dict[str, Any]:
        """Return the state dict; its tensors share memory with models and optimizers.

        Raises:
            ConfigError: an optimizer has a parameter that belongs to no model.
        """
        self._reshard()
        parameters = self._get_parameters()
        with in_user_code():  # hooks of modules
            state: dict[str, Any] = {key: get_model_state_dict(model) for key, model in self._models.items()}
        return state | {key: get_named_state(optimizer, parameters) for key, optimizer in self._optimizers.items()}

    def restore(
        self, directory: str | os.PathLike[str], *, quiet: bool = False, has_all_optimizers: bool = False
    ) -> None:
        """Load models and optimizers from a checkpoint, in place; collective.

        Tensors are cast to the current dtypes of the models, with a warning.

        Args:
            directory: checkpoint.
            quiet: issue no warnings about models; True if a former call has restored them.
            has_all_optimizers: warn of saved optimizers that are not loaded; False if another call restores them.

        Raises:
            LoadFailed: the checkpoint has other tensors or parameters, or no optimizer.
            ConfigError: an optimizer has a parameter that belongs to no model.
            DSQError: the checkpoint cannot be read.
        """
        self._reshard()
        comm = communicator(None)
        collect_placeholders = partial(self._collect_placeholders, directory, has_all_optimizers)
        with ExitStack() as stack:
            for optimizer in self._optimizers.values():
                if not has_state(optimizer):
                    stack.enter_context(reset_on_failure(optimizer))
            placeholders = run_on_all_ranks(comm, collect_placeholders, LoadFailed)
            for text in (*(() if quiet else placeholders.warnings), *placeholders.optimizer_warnings):
                warn(text, rank=comm.rank)
            load(placeholders.tensors, directory, refinement=placeholders.refinement, allow_cast=True)
            run_on_all_ranks(comm, lambda: self._apply_loaded(directory, placeholders), LoadFailed)

    def _collect_placeholders(self, directory: str | os.PathLike[str], has_all_optimizers: bool) -> _Placeholders:
        parameters = self._get_parameters()
        model_states: dict[str, Any] = {}
        for key, model in self._models.items():
            with in_user_code():
                model_states[key] = get_model_state_dict(model)
        with OpenedCheckpoint(directory, False, None) as opened:
            nesting = opened.paths
            if nesting is None or not all(key in {path[0] for path in nesting.values()} for key in self._models):
                raise LoadFailed(f"'{directory}' is no checkpoint of a model that this integration saved")
            modules: dict[tuple[Any, ...], nn.Module] = {(key,): model for key, model in self._models.items()}
            placeholders = ModulePlaceholders(modules, model_states, nesting, opened.tensors)
            placeholders.add_placeholders([placeholders.unexpected_keys])
            flat: dict[str, Any] = flatten_state_dict(model_states)[0]
            stored_paths = {name: path for name, path in nesting.items() if path[0] in self._models}
            warnings = _check_tensors(directory, flat, stored_paths, opened)
            manifest = opened.checkpoint.manifest
            if dropped := manifest.refinement == "dropped":
                warnings.append(describe_base_loss(opened.checkpoint.directory, manifest))
            keys = {str(path[0]) for path in nesting.values()} - self._models.keys()
            warnings += _describe_unread(directory, "model", keys, len(self._models))
            keys -= self._optimizers.keys()
            optimizer_warnings = (
                _describe_unread(directory, "optimizer", keys, len(self._optimizers)) if has_all_optimizers else []
            )
            for key in self._optimizers:
                if nesting.below((key,)) is None:
                    raise LoadFailed(
                        f"'{directory}' has no '{key}', so training cannot go on from it: was it saved with "
                        "save_only_model? Load its model alone, from an export of it (`dsq export --part model`)"
                    )
                stored_paths |= {name: path for name, path in nesting.items() if path[0] == key}
            own_entries = {
                key: OwnEntries(key, optimizer, parameters, directory) for key, optimizer in self._optimizers.items()
            }
            optimizer_warnings += [text for own in own_entries.values() for text in own.compare(nesting)]
            subclass_tensors = _collect_subclass_tensors(stored_paths, nesting, own_entries)
            stored_paths = {name: path for name, path in stored_paths.items() if find_class_key(path, nesting) is None}
            has_extra_entries = any(
                path[0] in self._optimizers and path[1] not in TORCH_KEYS for path in stored_paths.values()
            )
            extra_tensors = self._get_extra_tensors(parameters) if has_extra_entries else {}
            frozen = set[Path]()
            for name, path in stored_paths.items():
                if name not in opened.tensors:
                    flat[name] = _read_object(opened, name, path, own_entries)
                elif path[0] in self._optimizers:
                    shape, dtype = torch.Size(opened.tensors[name]["shape"]), opened.dtype(name)
                    if path[1] != "state":
                        flat[name] = create_placeholder(extra_tensors.get(name), shape, dtype)
                    elif (tensor := own_entries[str(path[0])].create_placeholder(path, shape, dtype)) is not None:
                        flat[name] = tensor
                    else:
                        frozen.add(path[:3])
            stored_paths = {name: path for name, path in stored_paths.items() if path[:3] not in frozen}
            optimizer_warnings += _describe_frozen(directory, frozen)
            tensors = {name: flat[name] for name in stored_paths if name in opened.tensors}
            without_state = {path[:2] for path in frozen}  # all of the state may be that of frozen parameters
            nesting.empty = [
                path for path in (*(nesting.empty or ()), *without_state)
                if path[0] in (*self._models, *self._optimizers) and path[:3] not in frozen
            ]
            full_state = nesting.unflatten({name: flat[name] for name in stored_paths})
            for path, tensor in subclass_tensors.items():
                tensors[".".join(map(str, path))] = tensor
                set_entry(full_state, nesting.steps(path), tensor)
            refinement: RefinementOption = False if dropped else "auto"
            return _Placeholders(
                tensors, full_state, placeholders.offered_keys, warnings, optimizer_warnings, refinement
            )

    def _get_extra_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return the tensors of optimizers' state dicts outside of `state` and `param_groups`, by flat names."""
        extra_states = {
            key: extra_entries(get_named_state(optimizer, parameters)) for key, optimizer in self._optimizers.items()
        }
        flat = flatten_state_dict(extra_states)[0]
        return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}

    def _apply_loaded(self, directory: str | os.PathLike[str], placeholders: _Placeholders) -> None:
        parameters, state = self._get_parameters(), placeholders.state
        for key, model in self._models.items():
            allow_unexpected = allow_unexpected_keys(model, placeholders.extra_keys.get((key,), ()), directory)
            with allow_unexpected as unexpected_keys, in_user_code(loads_module=True):
                set_model_state_dict(model, state[key])
            if unexpected_keys:
                raise unexpected_keys_error(sorted(unexpected_keys), directory)
        for key, optimizer in self._optimizers.items():
            names = get_parameter_names(optimizer, parameters)
            numbered_state = get_numbered_state(state[key], names, optimizer.param_groups, directory)
            try:
                with in_user_code():
                    optimizer.load_state_dict(numbered_state)
            except KeyError as error:
                raise LoadFailed(
                    f"'{directory}': {type(optimizer).__name__}.load_state_dict found no {error} in '{key}': was it "
                    "saved of another optimizer, or by another version of this one?"
                ) from error

    def _get_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all models by unique names; a tied parameter has several names."""
        parameters: dict[str, nn.Parameter] = {}
        for key, model in self._models.items():
            prefix = self._get_name_prefix(key)
            for name, parameter in get_named_parameters(model).items():
                parameters[f"{prefix}.{name}" if prefix else name] = parameter
        return parameters

    def _get_name_prefix(self, key: str) -> str:
        """Return the prefix of the names of a model's parameters.

        The first model has none, unless a module of it has the name of another model.
        """
        if key != "model":
            return key
        names = (strip_wrappers(name) for name, _ in self._models[key].named_modules())
        return key if any(name in self._models for name in names) else ""

    def _reshard(self) -> None:
        """Reshard parameters, since FSDP2 keeps the root gathered after an evaluation under `no_grad`."""
        for model in self._models.values():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _create_key(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _collect_subclass_tensors(
    stored_paths: Mapping[str, Path], nesting: Nesting, own_entries: Mapping[str, OwnEntries]
) -> dict[Path, torch.Tensor]:
    """Return the tensors of optimizers' state that belong to tensor subclasses, by path.

    Only the optimizer can create such tensors. If it has no state, create it by a step that changes nothing.
    """
    tensors_by_path = dict[Path, torch.Tensor]()
    for name, path in stored_paths.items():
        if (depth := find_class_key(path, nesting)) is not None:
            own = own_entries.get(str(path[0]))
            state = {} if own is None else own.state["state"]
            tensor = state.get(path[2], {}).get(path[3]) if depth == 4 else None
            if tensor is None:
                refuse_subclass_part(name, path, nesting)
            else:
                tensors_by_path[path[:depth]] = tensor
    return tensors_by_path


def _read_object(opened: OpenedCheckpoint, name: str, path: Path, own_entries: Mapping[str, OwnEntries]) -> Any:
    """Return a stored object; one that is more than plain data only if the optimizer has an object in its place.

    Raises:
        LoadFailed: it is more than plain data, and the optimizer has none.
    """
    try:
        return opened.object(name, allow_pickle=False)
    except ExportError as error:
        if (own := own_entries.get(str(path[0]))) is not None and path in own.entries:
            return opened.object(name, allow_pickle=True)
        raise LoadFailed(
            f"'{name}' of '{opened.checkpoint.directory}' is more than plain data, and unpickling it can run code: it "
            "is loaded only into an optimizer that has an object in its place"
        ) from error


def _describe_unread(directory: object, kind: str, keys: Collection[str], prepared: int) -> list[str]:
    """Return a warning about the saved models or optimizers among `keys`, which are not loaded."""
    if not (unread := sorted(key for key in keys if key.startswith(kind))):
        return []
    count = prepared + len(unread)
    return [
        f"'{directory}' has {kind}s that are not loaded, since fewer are prepared: {', '.join(unread)}; to load them, "
        f"prepare {count} {kind}{'s' if count > 1 else ''} in the order of the save"
    ]


def _describe_frozen(directory: object, frozen: Collection[Path]) -> list[str]:
    """Return a warning about the frozen parameters whose state is not loaded, by the paths of their state."""
    if not frozen:
        return []
    return [
        f"the optimizer state of {quote(sorted(str(path[2]) for path in frozen))} in '{directory}' is not loaded: "
        "these parameters need no gradient now, and the optimizer has nothing that tells how their state is sharded"
    ]


def _check_tensors(
    directory: object, model_tensors: Mapping[str, Any], stored_paths: Mapping[str, Any], opened: OpenedCheckpoint
) -> list[str]:
    """Compare names, shapes and dtypes of the models' tensors with the stored ones; return warnings.

    Raises:
        LoadFailed: names or shapes differ.
    """
    if missing := sorted(model_tensors.keys() - stored_paths.keys()):
        hint = name_hint(missing[0], stored_paths)
        raise mismatch_error(directory, f"'{directory}' has no '{missing[0]}', which the model has{hint}")
    if unexpected := sorted(stored_paths.keys() - model_tensors.keys()):
        raise mismatch_error(directory, f"'{directory}' has '{unexpected[0]}', which the model does not have")
    casts = []
    for name, value in model_tensors.items():
        if name in opened.tensors and isinstance(value, torch.Tensor):
            shape, dtype = tuple(opened.tensors[name]["shape"]), opened.dtype(name)
            if shape != tuple(value.shape):
                text = f"'{directory}': '{name}' is of shape {shape}, the model's of {tuple(value.shape)}"
                raise mismatch_error(directory, text)
            if dtype != value.dtype:
                casts.append(f"'{name}' as {dtype}, which is {value.dtype} now")
    if not casts:
        return []
    return [f"'{directory}' has {len(casts)} tensor(s) of another dtype than the model, which are cast: {casts[0]}"]
