"""What modules take from what they are given: extra states, and what goes through code of their own when it is loaded.

A load asks for what a module's `state_dict` tells, and goes into its own tensors. One that is new has others: scales of
observers of `torch.ao` have other shapes, those of Brevitas are not told yet, and a metric has no batches. So all that
was saved is asked for there, and the module's `load_state_dict` decides, as with a file of `torch.save`.
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

from dsq_ckpt.api.whole import refuse_parts
from dsq_ckpt.core.hints import OTHER_SHAPE
from dsq_ckpt.core.interrupts import in_users_function
from dsq_ckpt.core.nesting import Nesting, Path
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.subclasses import class_in
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.core.wrappers import unwrapped
from dsq_ckpt.dcp.nested import placeholder
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import LoadFailed

Keys = tuple[Any, ...]
Untold = Mapping[str, Collection[str]]
"""Names that were saved of a module, by its key, and that its state dict does not have on one rank."""
_EXTRA = "_extra_state"
_ABSENT = object()


def through_own_code(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those names of entries that go through code of a module's own when they are loaded.

    That is code of the module that has the entry, or of one around it. torch's own, which shards, changes no entries.
    """
    own = {unwrapped(name) for name, part in module.named_modules(remove_duplicate=False) if _has_own_code(part)}
    found = set()
    for name in names if own else ():
        plain = unwrapped(name)
        if any(plain[:end] in own for end in (0, *(place for place, letter in enumerate(plain) if letter == "."))):
            found.add(name)
    return found


class Given:
    """Saved entries of the modules that are loaded, as far as these do not simply tell them, on one rank.

    Args:
        modules: modules whose state dicts are in a state dict, by the keys that lead there.
        told: that state dict. What was saved of extra states and of what goes through code of a module's own is put
            in place of what has another form; the modules stay as they are.
        nesting: of the checkpoint.
        tensors: its index of tensors.
        left_out: names of entries that are not to be loaded.

    Attributes:
        plain: paths of values that the modules did not name: they are unpickled only as far as they are plain data.
        untold: names that are not in the state dicts.
        offered: names that were put there, by the keys of the module.
    """

    def __init__(
        self, modules: Mapping[Keys, nn.Module], told: dict[Any, Any], nesting: Nesting, tensors: Mapping[str, Any],
        left_out: Collection[str] = (),
    ) -> None:
        self.plain, self.untold = list[Path](), dict[str, set[str]]()
        self.offered: dict[Keys, set[str]] = {}
        self._modules, self._told, self._nesting, self._tensors = modules, told, nesting, tensors
        for keys, module in modules.items():
            own = reduce(getitem, keys, told)
            if not isinstance(own, MutableMapping):
                continue
            above, known = _path(keys), {unwrapped(str(name)) for name in own} | set(left_out)
            paths = [*nesting.values(), *(nesting.empty or ())]
            saved = {str(path[len(above)]) for path in paths if path[: len(above)] == above and len(path) > len(above)}
            self.untold[_text(keys)] = {name for name in saved if unwrapped(name) not in known}
            parameters = {unwrapped(name) for name, _ in module.named_parameters(remove_duplicate=False)}
            told_names = saved & own.keys()
            others = {name for name in told_names if unwrapped(name) not in parameters}
            names = through_own_code(module, others) | {name for name in told_names if _is_extra(name)}
            buffers = {unwrapped(name) for name, _ in module.named_buffers(remove_duplicate=False)}
            for name, value in self._saved(above, names).items():
                if unwrapped(name) in buffers and isinstance(own[name], torch.Tensor):
                    own[name] = self._sized(own[name], value)
                else:
                    own[name] = self._asked(own[name], value, (*above, name))

    def offer(self, everywhere: Iterable[Untold]) -> list[Path]:
        """Put what no rank tells into the state dicts, where code of the modules may take it.

        Args:
            everywhere: `untold` of all ranks: what another one tells, as of a stage of a pipeline, is its own.

        Returns:
            All of `plain`.

        Raises:
            LoadFailed: it is a tensor of another class than torch's own.
        """
        ranks = list(everywhere)
        for keys, module in self._modules.items():
            above = _path(keys)
            ours = [set(one[_text(keys)]) for one in ranks if _text(keys) in one]
            names = through_own_code(module, set.intersection(*ours) if ours else ())
            if not names:
                continue
            own, self.offered[keys] = reduce(getitem, keys, self._told), names
            like = {
                unwrapped(name): value.detach() for name, value in
                (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            }
            for name, value in self._saved(above, names).items():
                mine = like.get(unwrapped(name))
                own[name] = (
                    self._asked(_ABSENT, value, (*above, name)) if mine is None else self._sized(mine, value, new=True)
                )
        return self.plain

    def _saved(self, above: Path, names: Collection[str]) -> dict[str, Any]:
        """Return what was saved by some names below a path: flat names in the places of values."""
        deep = len(above)

        def below(path: Path) -> bool:
            return len(path) > deep and path[:deep] == above and path[deep] in names

        found = Nesting(
            {fqn: path[deep:] for fqn, path in self._nesting.items() if below(path)},
            {path[deep:]: key for path, key in self._nesting.typed.items() if below(path) and len(path) > deep + 1},
            [path[deep:] for path in self._nesting.empty or () if below(path)],
        )
        return found.nested({fqn: fqn for fqn in found})

    def _sized(self, own: torch.Tensor, saved: Any, new: bool = False) -> Any:
        """Return a tensor of the shape that was saved, like one of the module's, whose dtype counts; or `own` itself.

        `new` is for one that is never `own`.
        """
        if not isinstance(saved, str) or saved not in self._tensors:
            return own  # which the load refuses
        shape = torch.Size(self._tensors[saved]["shape"])
        if own.shape == shape:
            return torch.empty_like(own) if new else own
        return own.new_empty(shape) if type(own) in (torch.Tensor, nn.Parameter) else own

    def _asked(self, own: Any, saved: Any, path: Path) -> Any:
        """Return placeholders for what was saved at a path, by its own placeholders as far as these fit."""
        if isinstance(saved, dict):
            for key in saved:
                parts = (*path, str(key))
                if class_in(parts, self._nesting) is not None:
                    if not isinstance(own, torch.Tensor):
                        refuse_parts(".".join(map(str, path)), parts, self._nesting)
                    return own
            keys = {str(key): key for key in own} if isinstance(own, Mapping) else {}
            made = copy.copy(own) if isinstance(own, dict) else {}  # of its class
            made.clear()
            for key, value in saved.items():
                mine = keys.get(str(key), _ABSENT)
                made[key if mine is _ABSENT else mine] = self._asked(
                    _ABSENT if mine is _ABSENT else own[mine], value, (*path, str(key))
                )
            return made
        if isinstance(saved, list):
            entries = own if isinstance(own, list) else []
            return [
                self._asked(entries[place] if place < len(entries) else _ABSENT, value, (*path, place))
                for place, value in enumerate(saved)
            ]
        if saved not in self._tensors:
            if own is not _ABSENT and list(flatten_state_dict({"": own})[1].values()) == [("",)]:
                return own  # one object for DCP
            self.plain.append(path)
            return None
        if isinstance(own, DTensor | ShardedTensor):
            return own
        like = placeholder(self._tensors[saved], path, {})
        if not isinstance(own, torch.Tensor):
            return like
        if (own.shape, own.dtype) == (like.shape, like.dtype) or type(own) not in (torch.Tensor, nn.Parameter):
            return own
        return torch.empty_like(like, device=own.device)


@contextmanager
def leaving(module: Any, offered: Collection[str], path: str | os.PathLike[str]) -> Iterator[set[str]]:
    """Let a module leave aside what it was offered, and yield the set of the names of that, filled as it is loaded.

    Parameters that code of its own replaces by others, as Brevitas does, are put back with their values: an optimizer
    knows these objects, and so does DDP.

    Raises:
        LoadFailed: it does not take the shape of a tensor; the message says what it was loaded from, and what to do.
    """
    left, names = set[str](), {unwrapped(name): name for name in offered}

    def place(_: nn.Module, state: dict[str, Any], *__: Any) -> None:  # torch knows wrappers of what is told alone
        for name in names.values():
            if name in state:
                state[_in_wrappers(module, name)] = state.pop(name)

    def leave(_: nn.Module, keys: Any) -> None:
        left.update(names[unwrapped(key)] for key in keys.unexpected_keys if unwrapped(key) in names)
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if unwrapped(key) not in names]

    hooks = [
        module.register_load_state_dict_pre_hook(place), module.register_load_state_dict_post_hook(leave)
    ] if offered else []
    before = _parameters(module)
    try:
        yield left
        _put_back(module, before)
    except RuntimeError as error:
        if "size mismatch for " not in str(error):
            raise
        raise LoadFailed(f"'{path}': {' '.join(str(error).split()).rstrip('.')}: {OTHER_SHAPE}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _in_wrappers(module: nn.Module, name: str) -> str:
    """Return the name that an entry has in the state dict of a module, whose parts may be in wrappers."""
    plain = unwrapped(name)
    inside = {
        f"{own}.": part for part, _ in module.named_modules(remove_duplicate=False)
        if not (own := unwrapped(part)) or plain.startswith(f"{own}.")
    }
    above = max(inside, key=len)
    return ".".join(filter(None, (inside[above], plain.removeprefix(above))))


def _parameters(module: Any) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False)) if isinstance(module, nn.Module) else {}


@torch.no_grad()
def _put_back(module: Any, before: Mapping[str, nn.Parameter]) -> None:
    """Put the parameters of a module in the places of others of the same form, with the values of these."""
    for name, new in _parameters(module).items():
        old = before.get(name, new)
        alike = type(old) is type(new) is nn.Parameter and old.device == new.device
        if old is not new and alike and (old.shape, old.dtype) == (new.shape, new.dtype):
            old.copy_(new)
            old.requires_grad_(new.requires_grad)
            above, _, own = name.rpartition(".")
            setattr(module.get_submodule(above), own, old)


def left_by_all(given: Iterable[tuple[Collection[str], Collection[str]]]) -> list[str]:
    """Return names that ranks left aside and none took, of those that each was offered and that it left."""
    ranks = list(given)
    taken = {name for offered, left in ranks for name in offered if name not in left}
    return sorted({name for _, left in ranks for name in left} - taken)


def give_model(
    model: nn.Module, state: dict[str, Any], offered: Collection[str], directory: os.PathLike[str], strict: bool,
    comm: Communicator,
) -> None:
    """Give a model what was loaded from a directory; collective.

    Args:
        model: its hooks may fail on one rank alone.
        state: what was loaded, by names as of `get_model_state_dict`.
        offered: names in it that the model need not take.
        directory: the checkpoint.
        strict: the model has to take, on some rank, all that it is offered.
        comm: communicator of the ranks that load.

    Raises:
        LoadFailed: it does not.
        DSQError: what else failed, on every rank.
    """
    def give() -> tuple[Collection[str], set[str]]:
        with leaving(model, offered, directory) as left, in_users_function(loads_module=True):
            set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
        return offered, left

    left = left_by_all(gather_from_all_ranks(comm, give, LoadFailed))
    if left and strict:
        raise lacks(left, directory)
    if left:
        warn(not_taken(left, directory), rank=comm.rank)


def not_taken(names: list[str], path: str | os.PathLike[str]) -> str:
    """Return the warning of what was saved and a module did not take."""
    return f"{named(names)} of '{path}' was not loaded, since the module does not have it: is it the same model?"


def lacks(names: list[str], directory: str | os.PathLike[str]) -> LoadFailed:
    """Return the error for what was saved of a model, and the one that is to be restored does not have."""
    return LoadFailed(
        f"'{directory}' has {named(names)} in its model, which this model does not have: load into the same model, or "
        "name in a state dict what is to be loaded, dsq_ckpt.load({'model': ...}, path)"
    )


def needs_all(module: nn.Module, told: Mapping[Any, Any]) -> bool:
    """Return whether a module, whose state dict is given, may take more than that tells, or in another form."""
    return any(_is_extra(str(name)) for name in told) or any(map(_has_own_code, module.modules()))


def _path(keys: Keys) -> Path:
    return tuple(map(str, keys))


def _text(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _has_own_code(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
        or any(not _is_of_torch(hook) for hook in module._load_state_dict_pre_hooks.values())
    )


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
