"""Whether all ranks of a save were given the same path and configuration; compared before anything is written.

`RankSettings` travel with what ranks tell each other at the beginning of a save anyway, so no collective is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.config_trees import iter_dotted_keys
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.runs import canonicalize

_OWN = frozenset({"storage.threads", "storage.on_device", "storage.block_elements", "storage.zstd_level"})
"""Keys that may differ by rank: they say how a rank does its part, and nothing of what is stored or promised."""
_MOST = 5
_UNSET = "not set"


class RankSettings(NamedTuple):
    """Path and configuration that one rank was given.

    Attributes:
        path: the checkpoint directory, absolute.
        place: the same without links to its run.
        settings: values of the configuration that are not the defaults, by dotted key.
    """

    path: str
    place: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, path: Path, config: DSQConfig) -> RankSettings:
        """Return the settings of this rank."""
        usual = _defaults()
        found = iter_dotted_keys(config.model_dump())
        return cls(str(path), str(canonicalize(path)), {
            key: value for key, value in found if key not in _OWN and (key not in usual or usual[key] != value)
        })


def refuse_different(given: Sequence[RankSettings]) -> None:
    """Check that all ranks were given the same path and configuration.

    Args:
        given: settings of all ranks, in rank order.

    Raises:
        ConfigError: they were not; the message names the differing keys and the ranks.
    """
    if all(one == given[0] for one in given):
        return
    paths = _differing([one.path for one in given])
    if paths and len({one.place for one in given}) > 1:  # hosts may lead to one directory by links of their own
        raise ConfigError(
            f"the ranks of one save were given different paths: {paths}; give all of them the same directory, on "
            "storage that they share, and an absolute path where their working directories differ"
        )
    usual = _defaults()
    keys = sorted(set().union(*(one.settings for one in given)))
    values = {key: [one.settings.get(key, usual.get(key, _UNSET)) for one in given] for key in keys}
    differing = {key: text for key in keys if (text := _differing(values[key]))}
    if not differing:
        return
    # Codebooks of different kinds have different keys.
    kinds = tuple(key.removesuffix("fit") for key in differing if key.endswith(".codebook.fit"))
    shown = [f"{key} is {text}" for key, text in differing.items() if key.endswith(".fit") or not key.startswith(kinds)]
    more = f"; and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    raise ConfigError(
        f"the ranks of one save were given different configurations: {'; '.join(shown[:_MOST])}{more}; give all of "
        "them the same"
    )


def _differing(values: Sequence[Any]) -> str:
    """Return, for people, which value is on which ranks; empty if it is the same on all."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if value is _UNSET else repr(value), []).append(rank)
    return ", ".join(f"{value} on {_named(some)}" for value, some in ranks.items()) if len(ranks) > 1 else ""


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST]))
    return f"ranks {shown}" + (f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else "")


@cache
def _defaults() -> Mapping[str, Any]:
    return dict(iter_dotted_keys(DSQConfig().model_dump()))
