"""Parameter groups of optimizers on several ranks, which have other parameters where these are experts or stages.

A group lists the names of its parameters, and a load finds it by them. DCP stores the list of one rank, as it does with
the value of each option: what is stored in its place has the names of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.notices import warn

_GROUP = re.compile(r"((?:.*\.)?param_groups\.\d+)(?:\.(.+))?")


def is_of_group(name: str) -> bool:
    """Return whether a flat name is that of a group of an optimizer, or of one of its options."""
    found = _GROUP.fullmatch(name)
    return found is not None and found[2] != "params"


def options_of_groups(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the options of each group in a flat state dict, by the group's name."""
    found: dict[str, list[str]] = {}
    for name in sorted(state):
        if (group := _GROUP.fullmatch(name)) is not None and f"{group[1]}.params" in state:
            found.setdefault(group[1], []).append(group[2])
    return found


def lists_of_names(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the lists of parameters of the groups in a flat state dict, where parameters have names."""
    return {
        name: value for name, value in state.items()
        if type(value) is list and (group := _GROUP.fullmatch(name)) is not None and group[2] == "params"
        and all(type(one) is str for one in value)
    }


def united(ranks: Sequence[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Return the lists of all ranks together, if ranks have other ones; warn of parameters that are in two of them.

    Args:
        ranks: lists of each rank, by flat name.
    """
    distinct: list[Mapping[str, list[str]]] = []
    for own in ranks:
        if own not in distinct:
            distinct.append(own)
    if len(distinct) < 2:
        return {}
    found: dict[str, list[str]] = {name: [] for own in distinct for name in own}
    list_of: dict[tuple[str, str], str] = {}
    elsewhere: dict[str, None] = {}
    for own in distinct:
        for name, parameters in own.items():
            optimizer = name.rpartition("param_groups.")[0]
            for parameter in parameters:
                if (optimizer, parameter) not in list_of:
                    list_of[optimizer, parameter] = name
                    found[name].append(parameter)
                elif list_of[optimizer, parameter] != name:
                    elsewhere[parameter] = None
    if elsewhere:
        warn(
            f"{quote(list(elsewhere))} is in another parameter group of the optimizer on some ranks than on others, "
            "where a load of the optimizer is refused: make the same groups, in the same order, on all ranks"
        )
    return found
