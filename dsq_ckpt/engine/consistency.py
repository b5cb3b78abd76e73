"""Comparison of path and configuration between the ranks of a save, before anything is written.

`RankSettings` are sent with the first messages of a save, so no collective is added.
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

_PER_RANK_KEYS = frozenset({"storage.threads", "storage.on_device", "storage.block_elements", "storage.zstd_level"})
"""Keys that may differ between ranks: they affect how a rank works, not what is stored or guaranteed."""
_MAX_SHOWN = 5
_UNSET = "not set"


class RankSettings(NamedTuple):
    """The path and configuration of one rank.

    Attributes:
        path: the checkpoint directory, absolute.
        canonical_path: the same with links to its run resolved.
        settings: values of the configuration that are not the defaults, by dotted key.
    """

    path: str
    canonical_path: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, path: Path, config: DSQConfig) -> RankSettings:
        """Return the settings of this rank."""
        defaults = _defaults()
        settings = iter_dotted_keys(config.model_dump())
        return cls(str(path), str(canonicalize(path)), {
            key: value for key, value in settings
            if key not in _PER_RANK_KEYS and (key not in defaults or defaults[key] != value)
        })


def check_same_settings(ranks: Sequence[RankSettings]) -> None:
    """Raise if the ranks of a save have different paths or configurations.

    Args:
        ranks: settings of all ranks, in rank order.

    Raises:
        ConfigError: they differ; the message names the differing keys and the ranks.
    """
    if all(rank == ranks[0] for rank in ranks):
        return
    paths = _describe_differences([rank.path for rank in ranks])
    if paths and len({rank.canonical_path for rank in ranks}) > 1:  # hosts may have their own links to one directory
        raise ConfigError(
            f"the ranks of one save were given different paths: {paths}; give all of them the same directory, on "
            "storage that they share, and an absolute path where their working directories differ"
        )
    defaults = _defaults()
    keys = sorted(set().union(*(rank.settings for rank in ranks)))
    values = {key: [rank.settings.get(key, defaults.get(key, _UNSET)) for rank in ranks] for key in keys}
    differing = {key: text for key in keys if (text := _describe_differences(values[key]))}
    if not differing:
        return
    # Codebooks of different kinds have different keys.
    kinds = tuple(key.removesuffix("fit") for key in differing if key.endswith(".codebook.fit"))
    shown = [f"{key} is {text}" for key, text in differing.items() if key.endswith(".fit") or not key.startswith(kinds)]
    suffix = f"; and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    raise ConfigError(
        f"the ranks of one save were given different configurations: {'; '.join(shown[:_MAX_SHOWN])}{suffix}; give all "
        "of them the same"
    )


def _describe_differences(values: Sequence[Any]) -> str:
    """Return a description of which ranks have which value; empty if all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if value is _UNSET else repr(value), []).append(rank)
    return ", ".join(f"{value} on {_format_ranks(who)}" for value, who in ranks.items()) if len(ranks) > 1 else ""


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else "")


@cache
def _defaults() -> Mapping[str, Any]:
    return dict(iter_dotted_keys(DSQConfig().model_dump()))
