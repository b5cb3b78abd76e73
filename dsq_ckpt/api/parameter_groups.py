"""Parameter groups of an optimizer, each restored from the saved group that has its parameters.

torch matches groups by the names of their parameters. If the saved groups divide the parameters otherwise, torch leaves
a group without hyperparameters, or with those of another group. If no parameter has state, it matches groups by order.

A save on several ranks stores the parameter names of all ranks in each group. DCP's own planner, and earlier versions,
store those of one rank; a group with parameters of other ranks, or without parameters on this rank, is then matched by
its place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Nesting, set_entry
from dsq_ckpt.core.notices import warn
from dsq_ckpt.dcp.nested_planners import make_placeholder
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles

Groups = Sequence[Sequence[str]]
"""Names of the parameters of each group."""
Tree = dict[str, Any]
_COMMON_OPTIONS = frozenset({
    "params", "param_names", "step", "name", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum",
    "base_momentum",
})
"""Options of parameter groups that schedulers, users and some optimizers add, so that no class is known by them."""


def read_saved_groups(files: CheckpointFiles, nesting: Nesting) -> Groups:
    """Return the groups that a `Compressor` saved; empty if there are none, or if parameters have numbers as keys."""
    groups_by_number = {}
    for name, path in nesting.items():
        if path[:2] == ("optimizer", "param_groups") and path[3:] == ("params",):
            data = files.read_object(files.find_record(name, None))
            try:
                groups_by_number[path[2]] = torch.load(io.BytesIO(data), weights_only=True)
            except (pickle.UnpicklingError, EOFError, RuntimeError):  # more than plain data: no list of names
                return []
    groups = [groups_by_number[number] for number in sorted(groups_by_number)]
    have_names = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in groups)
    return groups if have_names else []


def warn_of_other_optimizer(key: str, optimizer: Optimizer, nesting: Nesting, rank: int) -> None:
    """Warn if saved parameter groups have options of another optimizer class, and lack some of this one's.

    Args:
        key: key of the optimizer at the top level of the checkpoint.
        optimizer: the optimizer to load into.
        nesting: nesting of the checkpoint.
        rank: this process's rank; rank 0 warns.
    """
    lacking, foreign = compare_options(key, optimizer, nesting)
    if lacking and foreign:
        warn(
            f"what was saved of '{key}' has {quote(foreign)} and lacks {quote(lacking)} in its groups, so it is of "
            f"another optimizer than {type(optimizer).__name__}: learning rate and weight decay are those that were "
            "saved, and moments may be missing. Leave it out of the load to begin with it as it is", rank=rank,
        )


def compare_options(key: str, optimizer: Optimizer, nesting: Nesting) -> tuple[list[str], list[str]]:
    """Return options of an optimizer's class that no saved group has, and saved ones that its groups do not have.

    If both are empty, the class is most likely the saved one. Adam has all options of Adamax, so that both count.
    """
    saved = {str(path[3]) for path in nesting.values() if path[:2] == (key, "param_groups") and len(path) > 3}
    defaults = getattr(optimizer, "defaults", {})  # an optimizer around another one may have none
    options = defaults.keys() & set().union(*optimizer.param_groups)  # defaults of some have more than groups take
    return sorted(options - saved), sorted(saved.difference(defaults, _COMMON_OPTIONS, *optimizer.param_groups))


def option_placeholders(nesting: Nesting, tensors: Mapping[str, Any]) -> dict[int, Tree]:
    """Return a placeholder for each saved option, by the number of its group.

    Args:
        nesting: nesting of the checkpoint.
        tensors: the checkpoint's index of tensors.
    """
    placeholders: dict[int, Tree] = {}
    for name, path in nesting.items():
        if path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            value = make_placeholder(tensors[name], path, {}) if name in tensors else None
            set_entry(placeholders.setdefault(int(path[2]), {}), nesting.steps(path)[3:], value)
    for path in nesting.empty or ():
        if path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            set_entry(placeholders.setdefault(int(path[2]), {}), nesting.steps(path)[3:], {}, keep=True)
    return placeholders


class GroupMatch:
    """Match of an optimizer's parameter groups with the saved groups, whose order may differ.

    Args:
        groups: parameter names of the optimizer's groups.
        saved_groups: parameter names of the saved groups; the optimizer may lack some of these.
        parameters: parameters of the model, by all of their names.
        with_state: names of the parameters whose state was saved.
        directory: the checkpoint, for messages.

    Attributes:
        unexpected_options: saved options that the optimizer does not have, set by `to_saved_order`: number of the saved
            group, and key.
        names: names of all parameters of the optimizer.
        ungrouped: names of those with saved state that are in no saved group; their groups are matched by place.
        saved_names: names of all saved parameters; for a tied parameter, the name that the optimizer uses.
        parameters: parameters of the optimizer, by all of their names.

    Raises:
        LoadFailed: a group has parameters of several saved groups, of none, or of one that another group matches too;
            or two saved parameters are tied in this model, so that one would be lost.
    """

    def __init__(
        self, groups: Groups, saved_groups: Groups, parameters: Mapping[str, nn.Parameter],
        with_state: Collection[str], directory: Path,
    ) -> None:
        own_name = {id(parameters[name]): name for names in groups for name in names if name in parameters}
        self._saved_name: dict[str, str] = {}
        number_of: dict[str, int] = {}
        for number, names in enumerate(saved_groups):
            for name in names:
                tied = own_name.get(id(parameters[name]), name) if name in parameters else name
                if tied in number_of:
                    raise LoadFailed(
                        f"'{directory}' has '{self._saved_name[tied]}' and '{name}' as two parameters, which are tied "
                        "in this model: load into a model in which they are not, and tie them then"
                    )
                self._saved_name[tied], number_of[tied] = name, number
        self._groups, self._original_groups = groups, list[Tree]()
        self.unexpected_options: list[tuple[int, str]] = []
        self._numbers: list[int] = []
        self.ungrouped: list[str] = []
        by_name = {number_of[name] for names in groups for name in names if name in number_of}
        empty = [number for number, names in enumerate(saved_groups) if not names]
        for group, names in enumerate(groups):
            numbers = sorted({number_of[name] for name in names if name in number_of})
            if not numbers:
                unlisted = [name for name in names if name in with_state]
                at_place = [group] if group < len(saved_groups) and (unlisted or not names) else []
                others = [] if names else empty
                candidates = at_place + others if len(groups) == len(saved_groups) else others + at_place
                numbers = [number for number in candidates if number not in {*by_name, *self._numbers}][:1]
                self.ungrouped += unlisted if numbers else []
            problem = self._find_problem(names, numbers)
            if problem is not None:
                raise LoadFailed(
                    f"the optimizer has other parameter groups than '{directory}': its group {group}, with "
                    f"{quote(list(names)) or 'no parameters'}, {problem}. Make it with groups that were saved, in any "
                    "order, or load the model alone, by a Compressor without an optimizer"
                )
            self._numbers += numbers
        self.names, self.saved_names = {name for names in groups for name in names}, number_of.keys()
        self.parameters = {name: parameter for name, parameter in parameters.items() if id(parameter) in own_name}

    def _find_problem(self, names: Sequence[str], numbers: Sequence[int]) -> str | None:
        if not numbers:
            return "has parameters of no saved group" if names else "is no saved group"
        if len(numbers) > 1:
            return f"has parameters of the saved groups {numbers[0]} and {numbers[1]}"
        if numbers[0] in self._numbers:
            group = self._numbers.index(numbers[0])
            return f"has parameters of the saved group {numbers[0]}, and so has its group {group}"
        return None

    def to_saved_order(self, groups: Sequence[Tree], saved: Mapping[int, Tree]) -> list[Tree]:
        """Return the optimizer's groups in the order of the saved groups, with an empty dict for one that it lacks.

        Args:
            groups: groups of the optimizer.
            saved: a placeholder for each saved option, by the number of its group; other options are omitted.
        """
        places: list[Tree] = [{} for _ in range(max(self._numbers, default=-1) + 1)]
        self._original_groups = list(groups)
        for number, group in zip(self._numbers, groups, strict=True):
            places[number] = {
                key: value if _replaces(value, group.get(key)) else group.get(key, value)
                for key, value in saved.get(number, {}).items()
            }
            self.unexpected_options += [(number, str(key)) for key in saved.get(number, {}) if key not in group]
        return places

    def from_saved_order(self, places: Sequence[Tree]) -> list[Tree]:
        """Invert `to_saved_order` after a load: the optimizer's groups and parameters, with the saved options."""
        return [
            {**group, **places[number], "params": [self._saved_name.get(name, name) for name in names]}
            for number, names, group in zip(self._numbers, self._groups, self._original_groups, strict=True)
        ]


def _replaces(placeholder: Any, own: Any) -> bool:
    """Return whether to load an option into its placeholder: an empty dict, or a tensor where the group has none."""
    if isinstance(placeholder, torch.Tensor):
        return not isinstance(own, torch.Tensor)
    return bool(placeholder == {})


@contextmanager
def restore_groups(optimizer: Optimizer, groups: Sequence[Tree]) -> Iterator[list[Tree]]:
    """Yield the groups with parameters, for torch to restore; then restore the groups without parameters.

    torch would leave the latter without hyperparameters unless they are last, and raises an error for two of them.

    Args:
        optimizer: the optimizer; it has only the groups with parameters in the block.
        groups: its groups, as from `GroupMatch.from_saved_order`.
    """
    before = optimizer.param_groups  # changed in place, since a wrapping optimizer may refer to the list
    original = list(before)
    before[:] = (group for group in original if group["params"])
    try:
        yield [group for group in groups if group["params"]]
    finally:
        restored = iter(list(optimizer.param_groups))  # torch makes a new list, unless it failed
        before[:] = original
        optimizer.param_groups[:] = [next(restored) if group["params"] else group for group in original]
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        if not group["params"]:
            group.update({**saved_group, "params": group["params"]})
