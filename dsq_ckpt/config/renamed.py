"""Configuration keys and values of earlier versions, which are still read."""

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
RENAMED_VALUES = {"search.fallback": {"gentlest": "conservative"}}
"""Present value by former value, by present key."""
_SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in (*RENAMED, *RENAMED_VALUES)))


def current_keys(tree: dict[str, Any], *, section: str = "", silent: bool = False) -> dict[str, Any]:
    """Return a configuration tree with the present name of every key and value.

    Args:
        tree: a configuration or one of its sections, as given by a user or by a manifest; keys may be dotted.
        section: dotted path of `tree` in the configuration; empty for the whole configuration.
        silent: do not warn of former names, as for a manifest, which nobody edits.

    Returns:
        A copy. A former key stays where the present key is given too, so that validation refuses it.
    """
    former: list[str] = []
    current = _current(tree, f"{section}." if section else "", former)
    for name in () if section else _SECTIONS:
        if isinstance(block := current.get(name), dict):
            current[name] = _current(block, f"{name}.", former)
    if former and not silent:
        warn(f"the configuration has former names, which are still read: {', '.join(former)}")
    return current


def _current(block: dict[str, Any], prefix: str, former: list[str]) -> dict[str, Any]:
    """Return a block with present keys and values, and add a text for each that was replaced to `former`."""
    current = {}
    for key, value in block.items():
        path = f"{prefix}{key}"
        if path in RENAMED and (present := RENAMED[path].removeprefix(prefix)) not in block:
            former.append(f"'{path}' is now '{RENAMED[path]}'")
            key = present
        values = RENAMED_VALUES.get(f"{prefix}{key}", {})
        if isinstance(value, str) and value in values:
            former.append(f"'{prefix}{key}: {value}' is now '{prefix}{key}: {values[value]}'")
            value = values[value]
        current[key] = value
    return current
