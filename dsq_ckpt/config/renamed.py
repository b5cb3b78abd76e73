"""Configuration keys of earlier versions, which are still read."""

from __future__ import annotations

from typing import Any

from dsq_ckpt.core.notices import warn

RENAMED = {
    "quantize.share": "quantize.granularity",
    "search.share": "search.max_progress_loss",
    "search.gentler_only": "search.monotone",
    "search.spread": "search.parallel_trials",
    "search.otherwise": "search.fallback",
}
"""Present key by former key, dotted; both lie in the same section."""
_SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in RENAMED))


def current_keys(tree: dict[str, Any], *, section: str = "", silent: bool = False) -> dict[str, Any]:
    """Return a configuration tree with the present name of every key.

    Args:
        tree: a configuration or one of its sections, as given by a user or by a manifest; keys may be dotted.
        section: dotted path of `tree` in the configuration; empty for the whole configuration.
        silent: do not warn of former keys, as for a manifest, which nobody edits.

    Returns:
        A copy. A former key stays where the present key is given too, so that validation refuses it.
    """
    former: list[str] = []
    current = _current(tree, f"{section}." if section else "", former)
    for name in () if section else _SECTIONS:
        if isinstance(block := current.get(name), dict):
            current[name] = _current(block, f"{name}.", former)
    if former and not silent:
        pairs = ", ".join(f"'{key}' is now '{RENAMED[key]}'" for key in former)
        warn(f"the configuration has former names of keys, which are still read: {pairs}")
    return current


def _current(block: dict[str, Any], prefix: str, former: list[str]) -> dict[str, Any]:
    """Return a block with present keys, and add the former keys that were replaced to `former`."""
    current = {}
    for key, value in block.items():
        path = f"{prefix}{key}"
        if path in RENAMED and (present := RENAMED[path].removeprefix(prefix)) not in block:
            former.append(path)
            key = present
        current[key] = value
    return current
