"""Parameter groups of optimizers with different parameters on different ranks, such as experts or pipeline stages.

A group lists the names of its parameters, by which a load finds it. DCP would store the list of one rank, as for any
value. Instead the merged list of all ranks is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.notices import warn

_GROUP = re.compile(r"((?:.*\.)?param_groups\.\d+)(?:\.(.+))?")


def is_group_name(name: str) -> bool:
    """Return whether a flat name belongs to a parameter group of an optimizer, or to one of its options."""
    match = _GROUP.fullmatch(name)
    return match is not None and match[2] != "params"


def find_group_options(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the options of each group in a flat state dict, by the group's name."""
    options: dict[str, list[str]] = {}
    for name in sorted(state):
        if (group := _GROUP.fullmatch(name)) is not None and f"{group[1]}.params" in state:
            options.setdefault(group[1], []).append(group[2])
    return options


def find_parameter_lists(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the parameter lists of the groups in a flat state dict, if parameters have names."""
    return {
        name: value for name, value in state.items()
        if type(value) is list and (group := _GROUP.fullmatch(name)) is not None and group[2] == "params"
        and all(type(parameter) is str for parameter in value)
    }


def merge_parameter_lists(ranks: Sequence[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Return the merged lists of all ranks if they differ, else {}; warn of parameters in two different groups.

    Args:
        ranks: lists of each rank, by flat name.
    """
    distinct: list[Mapping[str, list[str]]] = []
    for names in ranks:
        if names not in distinct:
            distinct.append(names)
    if len(distinct) < 2:
        return {}
    merged: dict[str, list[str]] = {name: [] for names in distinct for name in names}
    list_of: dict[tuple[str, str], str] = {}
    other_ranks: dict[str, None] = {}
    for names in distinct:
        for name, parameters in names.items():
            optimizer = name.rpartition("param_groups.")[0]
            for parameter in parameters:
                if (optimizer, parameter) not in list_of:
                    list_of[optimizer, parameter] = name
                    merged[name].append(parameter)
                elif list_of[optimizer, parameter] != name:
                    other_ranks[parameter] = None
    if other_ranks:
        warn(
            f"{quote(list(other_ranks))} is in another parameter group of the optimizer on some ranks than on others, "
            "where a load of the optimizer is refused: make the same groups, in the same order, on all ranks"
        )
    return merged
