"""Whether the parameter groups of an optimizer are those that were saved.

torch finds a group by the names of its parameters: where they were divided otherwise, it leaves a group without
hyperparameters, or with those of another one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles

Groups = Sequence[Sequence[str]]
"""Names of the parameters of each group."""


def saved_groups(files: CheckpointFiles, nesting: Nesting) -> Groups:
    """Return the groups that a `Compressor` saved; empty if parameters have numbers, or there are none.

    Of ranks whose parameters differ, such as experts, they are those of one rank.
    """
    found = {}
    for name, path in nesting.items():
        if path[:2] == ("optimizer", "param_groups") and path[3:] == ("params",):
            data = files.object_bytes(files.find(name, None))
            found[path[2]] = torch.load(io.BytesIO(data), weights_only=True)
    groups = [found[number] for number in sorted(found)]
    named_ones = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in groups)
    return groups if named_ones else []


def refuse_other_groups(own: Groups, saved: Groups, directory: Path) -> None:
    """Refuse groups that divide parameters otherwise than those that were saved; their order may differ.

    Raises:
        LoadFailed: the number of groups differs, or a group has parameters of several saved ones, of none, or of one
            that another group has too.
    """
    problem = _problem(own, saved)
    if problem is not None:
        raise LoadFailed(
            f"the optimizer has other parameter groups than '{directory}': {problem}. Make it with the groups that "
            "were saved, in any order, or load the model alone, by a Compressor without an optimizer"
        )


def refuse_newly_tied(parameters: Mapping[str, nn.Parameter], saved: Groups, directory: Path) -> None:
    """Refuse a model in which one parameter is what the saved optimizer had as two, of which one would be lost.

    Args:
        parameters: parameters of the model, by all of their names.
        saved: groups that were saved.
        directory: the checkpoint.

    Raises:
        LoadFailed: there is such a parameter.
    """
    first: dict[int, str] = {}
    for name in (name for names in saved for name in names if name in parameters):
        other = first.setdefault(id(parameters[name]), name)
        if other != name:
            raise LoadFailed(
                f"'{directory}' has '{other}' and '{name}' as two parameters, which are tied in this model: load "
                "into a model in which they are not, and tie them then"
            )


def _problem(own: Groups, saved: Groups) -> str | None:
    if len(own) != len(saved):
        return f"it has {len(own)}, and {len(saved)} were saved"
    number_of = {name: number for number, names in enumerate(saved) for name in names}
    taken: dict[int, int] = {}
    for group, names in enumerate(own):
        numbers = sorted({number_of[name] for name in names if name in number_of})
        which = f"its group {group}, with {named(list(names))}, has parameters of"
        if names and not numbers:
            return f"{which} no saved group"
        if len(numbers) > 1:
            return f"{which} the saved groups {numbers[0]} and {numbers[1]}"
        if numbers and taken.setdefault(numbers[0], group) != group:
            return f"{which} the saved group {numbers[0]}, and so has its group {taken[numbers[0]]}"
    return None
