"""The parameter groups of an optimizer, each restored from the saved group that has its parameters.

torch finds a group by the names of its parameters: where they were divided otherwise, it leaves a group without
hyperparameters, or with those of another one. It does not where nothing has state, and takes groups by their order.

A save on several ranks names the parameters of all in each group, but DCP's own planner, and earlier versions, those of
one rank: a group of others is then the one at its place, as is a group of which a rank has no parameters.
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

from dsq_ckpt.core.nesting import Nesting, put
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.dcp.nested import placeholder
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles

Groups = Sequence[Sequence[str]]
"""Names of the parameters of each group."""
Tree = dict[str, Any]


def saved_groups(files: CheckpointFiles, nesting: Nesting) -> Groups:
    """Return the groups that a `Compressor` saved; empty if parameters have numbers, or there are none."""
    found = {}
    for name, path in nesting.items():
        if path[:2] == ("optimizer", "param_groups") and path[3:] == ("params",):
            data = files.object_bytes(files.find(name, None))
            try:
                found[path[2]] = torch.load(io.BytesIO(data), weights_only=True)
            except (pickle.UnpicklingError, EOFError, RuntimeError):  # more than plain data: no list of names
                return []
    groups = [found[number] for number in sorted(found)]
    named_ones = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in groups)
    return groups if named_ones else []


def saved_options(nesting: Nesting, tensors: Mapping[str, Any]) -> dict[int, Tree]:
    """Return a placeholder of each option that a `Compressor` saved, by the number of its group.

    Args:
        nesting: of the checkpoint.
        tensors: its index of tensors.
    """
    found: dict[int, Tree] = {}
    for name, path in nesting.items():
        if path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            value = placeholder(tensors[name], path, {}) if name in tensors else None
            put(found.setdefault(int(path[2]), {}), nesting.steps(path)[3:], value)
    for path in nesting.empty or ():
        if path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            put(found.setdefault(int(path[2]), {}), nesting.steps(path)[3:], {}, keep=True)
    return found


class GroupsByName:
    """The groups of an optimizer beside those that were saved, whose order may be another.

    Args:
        own: groups of the optimizer.
        saved: groups that were saved, of which the optimizer may lack some.
        parameters: parameters of the model, by all of their names.
        with_state: names of the parameters whose state was saved.
        directory: the checkpoint.

    Attributes:
        new: options that were saved and that the optimizer lacks, after `asked`: number of a group, and name.
        own: names of all parameters of the optimizer.
        placed: names of those that no saved group has, though their state was saved; their groups are found by place.
        saved: names of all parameters that were saved; of a tied parameter the one that the optimizer has.
        parameters: parameters of the optimizer, by all of their names.

    Raises:
        LoadFailed: a group has parameters of several saved ones, of none, or of one that another group has too; or one
            parameter is what was saved as two, of which one would be lost.
    """

    def __init__(
        self, own: Groups, saved: Groups, parameters: Mapping[str, nn.Parameter], with_state: Collection[str],
        directory: Path,
    ) -> None:
        own_name = {id(parameters[name]): name for names in own for name in names if name in parameters}
        self._saved_name: dict[str, str] = {}
        number_of: dict[str, int] = {}
        for number, names in enumerate(saved):
            for name in names:
                tied = own_name.get(id(parameters[name]), name) if name in parameters else name
                if tied in number_of:
                    raise LoadFailed(
                        f"'{directory}' has '{self._saved_name[tied]}' and '{name}' as two parameters, which are tied "
                        "in this model: load into a model in which they are not, and tie them then"
                    )
                self._saved_name[tied], number_of[tied] = name, number
        self._groups, self._asked, self.new = own, list[Tree](), list[tuple[int, str]]()
        self._numbers: list[int] = []
        self.placed: list[str] = []
        by_name = {number_of[name] for names in own for name in names if name in number_of}
        empty = [number for number, names in enumerate(saved) if not names]
        for group, names in enumerate(own):
            numbers = sorted({number_of[name] for name in names if name in number_of})
            if not numbers:
                unlisted = [name for name in names if name in with_state]
                at_place = [group] if group < len(saved) and (unlisted or not names) else []
                others = [] if names else empty
                in_order = at_place + others if len(own) == len(saved) else others + at_place
                numbers = [number for number in in_order if number not in {*by_name, *self._numbers}][:1]
                self.placed += unlisted if numbers else []
            problem = self._problem(names, numbers)
            if problem is not None:
                raise LoadFailed(
                    f"the optimizer has other parameter groups than '{directory}': its group {group}, with "
                    f"{named(list(names)) or 'no parameters'}, {problem}. Make it with groups that were saved, in any "
                    "order, or load the model alone, by a Compressor without an optimizer"
                )
            self._numbers += numbers
        self.own, self.saved = {name for names in own for name in names}, number_of.keys()
        self.parameters = {name: one for name, one in parameters.items() if id(one) in own_name}

    def _problem(self, names: Sequence[str], numbers: Sequence[int]) -> str | None:
        if not numbers:
            return "has parameters of no saved group" if names else "is no saved group"
        if len(numbers) > 1:
            return f"has parameters of the saved groups {numbers[0]} and {numbers[1]}"
        if numbers[0] in self._numbers:
            other = self._numbers.index(numbers[0])
            return f"has parameters of the saved group {numbers[0]}, and so has its group {other}"
        return None

    def asked(self, groups: Sequence[Tree], saved: Mapping[int, Tree]) -> list[Tree]:
        """Return the optimizer's groups in the places of those that were saved; what it lacks is an empty dict.

        Args:
            groups: those of the optimizer.
            saved: a placeholder of each option that was saved, by the number of its group. An option that was not
                saved is left out.
        """
        places: list[Tree] = [{} for _ in range(max(self._numbers, default=-1) + 1)]
        self._asked = list(groups)
        for number, group in zip(self._numbers, groups, strict=True):
            places[number] = {
                key: value if value == {} else group.get(key, value) for key, value in saved.get(number, {}).items()
            }
            self.new += [(number, str(key)) for key in saved.get(number, {}) if key not in group]
        return places

    def restored(self, places: Sequence[Tree]) -> list[Tree]:
        """Invert `asked` after a load: groups with what was saved, their own parameters, and what was not saved."""
        return [
            {**group, **places[number], "params": [self._saved_name.get(name, name) for name in names]}
            for number, names, group in zip(self._numbers, self._groups, self._asked, strict=True)
        ]


@contextmanager
def filled_groups(optimizer: Optimizer, groups: Sequence[Tree]) -> Iterator[list[Tree]]:
    """Yield the groups that torch is to restore, and restore those without parameters itself.

    torch would leave these without hyperparameters unless they are last, and refuses two of them.

    Args:
        optimizer: it has no others meanwhile.
        groups: its groups, as `GroupsByName.restored` returns them.
    """
    before = optimizer.param_groups  # changed in place, since an optimizer around this one may have it too
    own = list(before)
    before[:] = (group for group in own if group["params"])
    try:
        yield [group for group in groups if group["params"]]
    finally:
        restored = iter(list(optimizer.param_groups))  # new ones, in a new list, unless torch failed
        before[:] = own
        optimizer.param_groups[:] = [next(restored) if group["params"] else group for group in own]
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        if not group["params"]:
            group.update({**saved, "params": group["params"]})
