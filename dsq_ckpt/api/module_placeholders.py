"""Placeholders for saved entries of modules: extra states, and entries that custom loading code handles.

A load fills the tensors of a module's current state dict. Those of a new module may differ from the saved ones: scales
of `torch.ao`'s observers have other shapes, Brevitas adds its scales later, and a metric has no batches yet. So all
saved entries of such modules are loaded into placeholders, and the module's `load_state_dict` decides about them, as
with a file of `torch.save`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from dsq_ckpt.api.object_placeholders import UnexpectedKeys, refuse_subclass_part
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.hints import SHAPE_MISMATCH_ADVICE
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.core.nesting import Nesting, Path
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.tensor_subclasses import find_class_key
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.dcp.nested_planners import make_placeholder
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import LoadFailed

Keys = tuple[Any, ...]
_EXTRA_STATE = "_extra_state"
_ABSENT = object()


def select_custom_loaded(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the keys of entries that custom code of a submodule handles when they are loaded.

    The submodule has the entry, or is a parent of the one that has it. Hooks of torch itself, which shard parameters,
    do not count.
    """
    custom = {
        strip_wrappers(name) for name, submodule in module.named_modules(remove_duplicate=False)
        if _overrides_loading(submodule)
    }
    selected = set()
    for name in names if custom else ():
        plain = strip_wrappers(name)
        if any(plain[:end] in custom for end in (0, *(index for index, letter in enumerate(plain) if letter == "."))):
            selected.add(name)
    return selected


class ModulePlaceholders:
    """Placeholders in the state dicts of modules, on one rank.

    Extra states and entries that custom loading code handles are replaced by placeholders of the saved form; the
    modules are not changed.

    Args:
        modules: modules by the keys that lead to their state dicts in `state`.
        state: the state dict to load into.
        nesting: nesting of the checkpoint.
        tensors: the checkpoint's index of tensors.
        excluded_keys: keys of the modules' state dicts that are not loaded.

    Attributes:
        plain_paths: paths of saved objects that the state dicts do not have; they are unpickled only if they are plain
            data.
        unexpected_keys: saved keys that the state dicts do not have.
        offered_keys: keys that `add_placeholders` added, by the keys of the module.
    """

    def __init__(
        self, modules: Mapping[Keys, nn.Module], state: dict[Any, Any], nesting: Nesting, tensors: Mapping[str, Any],
        excluded_keys: Collection[str] = (),
    ) -> None:
        self.plain_paths, self.unexpected_keys = list[Path](), dict[str, set[str]]()
        self.offered_keys: dict[Keys, set[str]] = {}
        self._modules, self._state, self._nesting, self._tensors = modules, state, nesting, tensors
        for keys, module in modules.items():
            entries = reduce(getitem, keys, state)
            if not isinstance(entries, MutableMapping):
                continue
            prefix, expected = _to_path(keys), {strip_wrappers(str(name)) for name in entries} | set(excluded_keys)
            paths = [*nesting.values(), *(nesting.empty or ())]
            depth = len(prefix)
            saved_names = {str(path[depth]) for path in paths if path[:depth] == prefix and len(path) > depth}
            self.unexpected_keys[_to_key(keys)] = {name for name in saved_names if strip_wrappers(name) not in expected}
            parameters = {strip_wrappers(name) for name, _ in module.named_parameters(remove_duplicate=False)}
            common = saved_names & entries.keys()
            others = {name for name in common if strip_wrappers(name) not in parameters}
            names = select_custom_loaded(module, others) | {name for name in common if _is_extra_state(name)}
            buffers = {strip_wrappers(name) for name, _ in module.named_buffers(remove_duplicate=False)}
            for name, value in self._saved_entries(prefix, names).items():
                if strip_wrappers(name) in buffers and isinstance(entries[name], torch.Tensor):
                    entries[name] = self._tensor_placeholder(entries[name], value)
                else:
                    entries[name] = self._nested_placeholders(entries[name], value, (*prefix, name))

    def add_placeholders(self, unexpected_keys: Iterable[UnexpectedKeys]) -> list[Path]:
        """Add placeholders for saved entries that no rank has and that custom loading code may accept.

        Args:
            unexpected_keys: `unexpected_keys` of all ranks. A key that one rank expects, such as that of a stage of a
                pipeline, is loaded by that rank alone.

        Returns:
            All of `plain_paths`.

        Raises:
            LoadFailed: an entry is a tensor subclass.
        """
        ranks = list(unexpected_keys)
        for keys, module in self._modules.items():
            prefix = _to_path(keys)
            key_sets = [set(unexpected[_to_key(keys)]) for unexpected in ranks if _to_key(keys) in unexpected]
            names = select_custom_loaded(module, set.intersection(*key_sets) if key_sets else ())
            if not names:
                continue
            entries, self.offered_keys[keys] = reduce(getitem, keys, self._state), names
            module_tensors = {
                strip_wrappers(name): value.detach() for name, value in
                (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            }
            for name, value in self._saved_entries(prefix, names).items():
                like = module_tensors.get(strip_wrappers(name))
                if like is None:
                    entries[name] = self._nested_placeholders(_ABSENT, value, (*prefix, name))
                else:
                    entries[name] = self._tensor_placeholder(like, value, new=True)
        return self.plain_paths

    def _saved_entries(self, prefix: Path, names: Collection[str]) -> dict[str, Any]:
        """Return the saved entries with these names below a path, with flat names in place of values."""
        depth = len(prefix)

        def below(path: Path) -> bool:
            return len(path) > depth and path[:depth] == prefix and path[depth] in names

        nesting = Nesting(
            {fqn: path[depth:] for fqn, path in self._nesting.items() if below(path)},
            {path[depth:]: key for path, key in self._nesting.typed.items() if below(path) and len(path) > depth + 1},
            [path[depth:] for path in self._nesting.empty or () if below(path)],
        )
        return nesting.unflatten({fqn: fqn for fqn in nesting})

    def _tensor_placeholder(self, tensor: torch.Tensor, saved_entry: Any, new: bool = False) -> Any:
        """Return a tensor of the saved shape and of the dtype of the module's tensor `tensor`.

        That is `tensor` itself if its shape is the saved one, unless `new`.
        """
        if not isinstance(saved_entry, str) or saved_entry not in self._tensors:
            return tensor  # no tensor was saved: the load raises the error
        shape = torch.Size(self._tensors[saved_entry]["shape"])
        if tensor.shape == shape:
            return torch.empty_like(tensor) if new else tensor
        return tensor.new_empty(shape) if type(tensor) in (torch.Tensor, nn.Parameter) else tensor

    def _nested_placeholders(self, entry: Any, saved_entry: Any, path: Path) -> Any:
        """Return placeholders for the saved entries at a path; entries of `entry` that fit are used themselves."""
        if isinstance(saved_entry, dict):
            for key in saved_entry:
                parts = (*path, str(key))
                if find_class_key(parts, self._nesting) is not None:
                    if not isinstance(entry, torch.Tensor):
                        refuse_subclass_part(".".join(map(str, path)), parts, self._nesting)
                    return entry
            keys = {str(key): key for key in entry} if isinstance(entry, Mapping) else {}
            placeholders = copy.copy(entry) if isinstance(entry, dict) else {}  # keeps the class of the dict
            placeholders.clear()
            for key, value in saved_entry.items():
                own_key = keys.get(str(key), _ABSENT)
                placeholders[key if own_key is _ABSENT else own_key] = self._nested_placeholders(
                    _ABSENT if own_key is _ABSENT else entry[own_key], value, (*path, str(key))
                )
            return placeholders
        if isinstance(saved_entry, list):
            entries = entry if isinstance(entry, list) else []
            return [
                self._nested_placeholders(entries[index] if index < len(entries) else _ABSENT, value, (*path, index))
                for index, value in enumerate(saved_entry)
            ]
        if saved_entry not in self._tensors:
            if entry is not _ABSENT and list(flatten_state_dict({"": entry})[1].values()) == [("",)]:
                return entry  # DCP takes it for one object
            self.plain_paths.append(path)
            return None
        if isinstance(entry, DTensor | ShardedTensor):
            return entry
        like = make_placeholder(self._tensors[saved_entry], path, {})
        if not isinstance(entry, torch.Tensor):
            return like
        if (entry.shape, entry.dtype) == (like.shape, like.dtype) or type(entry) not in (torch.Tensor, nn.Parameter):
            return entry
        return torch.empty_like(like, device=entry.device)


@contextmanager
def allow_unexpected_keys(module: Any, offered: Collection[str], path: str | os.PathLike[str]) -> Iterator[set[str]]:
    """Let a module load a state dict with offered keys that it may not expect; yield the set of those it did not.

    The set is filled during the load. If custom loading code replaces parameters, as Brevitas does, the original ones
    are restored with the new values, since the optimizer and DDP refer to them.

    Raises:
        LoadFailed: the shape of a tensor does not match; the message names the checkpoint and a remedy.
    """
    unexpected, names = set[str](), {strip_wrappers(name): name for name in offered}

    def add_wrapper_prefixes(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in names.values():  # torch adds prefixes to the keys of the module's state dict alone
            if name in state:
                state[_wrapped_name(module, name)] = state.pop(name)

    def collect_unexpected(_: nn.Module, keys: Any) -> None:
        unexpected.update(names[strip_wrappers(key)] for key in keys.unexpected_keys if strip_wrappers(key) in names)
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if strip_wrappers(key) not in names]

    hooks = [
        module.register_load_state_dict_pre_hook(add_wrapper_prefixes),
        module.register_load_state_dict_post_hook(collect_unexpected),
    ] if offered else []
    before = _named_parameters(module)
    try:
        yield unexpected
        _restore_parameters(module, before)
    except RuntimeError as error:
        if "size mismatch for " not in str(error):
            raise
        raise LoadFailed(f"'{path}': {' '.join(str(error).split()).rstrip('.')}: {SHAPE_MISMATCH_ADVICE}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _wrapped_name(module: nn.Module, name: str) -> str:
    """Return the key of an entry in the state dict of a module, with the prefixes of wrappers of its submodules."""
    plain = strip_wrappers(name)
    inside = {
        f"{plain_part}.": part for part, _ in module.named_modules(remove_duplicate=False)
        if not (plain_part := strip_wrappers(part)) or plain.startswith(f"{plain_part}.")
    }
    longest = max(inside, key=len)
    return ".".join(filter(None, (inside[longest], plain.removeprefix(longest))))


def _named_parameters(module: Any) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False)) if isinstance(module, nn.Module) else {}


@torch.no_grad()
def _restore_parameters(module: Any, before: Mapping[str, nn.Parameter]) -> None:
    """Put the previous parameters of a module back, with the values of those of the same form that replaced them."""
    for name, new in _named_parameters(module).items():
        old = before.get(name, new)
        is_replaceable = type(old) is type(new) is nn.Parameter and old.device == new.device
        if old is not new and is_replaceable and (old.shape, old.dtype) == (new.shape, new.dtype):
            old.copy_(new)
            old.requires_grad_(new.requires_grad)
            module_name, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(module_name), attribute, old)


def unexpected_on_all_ranks(gathered: Iterable[tuple[Collection[str], Collection[str]]]) -> list[str]:
    """Return the offered keys that no rank accepted, from the offered and the unexpected keys of each rank."""
    ranks = list(gathered)
    accepted = {name for offered, unexpected in ranks for name in offered if name not in unexpected}
    return sorted({name for _, unexpected in ranks for name in unexpected} - accepted)


def load_model_state(
    model: nn.Module, state: dict[str, Any], offered: Collection[str], directory: os.PathLike[str], strict: bool,
    comm: Communicator,
) -> None:
    """Load a state dict into a model; collective.

    Args:
        model: the model, whose hooks may fail on one rank alone.
        state: the loaded state dict, with keys as from `get_model_state_dict`.
        offered: keys of it that the model may not expect.
        directory: the checkpoint, for messages.
        strict: raise an error for offered keys that the model does not expect on any rank, in place of a warning.
        comm: communicator of the ranks that load.

    Raises:
        LoadFailed: there are unexpected keys, with `strict`.
        DSQError: any other failure, on every rank.
    """
    def load() -> tuple[Collection[str], set[str]]:
        with allow_unexpected_keys(model, offered, directory) as unexpected, in_user_code(loads_module=True):
            set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
        return offered, unexpected

    unexpected = unexpected_on_all_ranks(gather_from_all_ranks(comm, load, LoadFailed))
    if unexpected and strict:
        raise unexpected_keys_error(unexpected, directory)
    if unexpected:
        warn(unexpected_keys_warning(unexpected, directory), rank=comm.rank)


def unexpected_keys_warning(names: list[str], path: str | os.PathLike[str]) -> str:
    """Return the text of a warning of saved keys that a module does not have."""
    return f"{quote(names)} of '{path}' was not loaded, since the module does not have it: is it the same model?"


def unexpected_keys_error(names: list[str], directory: str | os.PathLike[str]) -> LoadFailed:
    """Return the error for saved keys that the model to be restored does not have."""
    return LoadFailed(
        f"'{directory}' has {quote(names)} in its model, which this model does not have: load into the same model, or "
        "name in a state dict what is to be loaded, dsq_ckpt.load({'model': ...}, path)"
    )


def has_custom_loading(module: nn.Module, state: Mapping[Any, Any]) -> bool:
    """Return whether a module may accept keys beyond those of its state dict, or values of another form."""
    return any(_is_extra_state(str(name)) for name in state) or any(map(_overrides_loading, module.modules()))


def _to_path(keys: Keys) -> Path:
    return tuple(map(str, keys))


def _to_key(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _overrides_loading(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
        or any(not _is_torch_hook(hook) for hook in module._load_state_dict_pre_hooks.values())
    )


def _is_torch_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
