"""Configurations as trees of plain values: reading from files and presets, merging and comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from dsq_ckpt.core.strict_json import make_unique_mapping
from dsq_ckpt.errors import ConfigError

Tree = dict[str, Any]


def read_tree(path: str | os.PathLike[str]) -> Tree:
    """Return the tree in a JSON or YAML file.

    Raises:
        ConfigError: the file cannot be read or parsed, does not hold a mapping, or has a duplicate key.
    """
    path = Path(os.path.expanduser(path))
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file '{path}' is no text; name a JSON or YAML file") from error
    try:
        is_json = path.suffix == ".json"
        tree = json.loads(text, object_pairs_hook=make_unique_mapping) if is_json else _parse_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file '{path}' is not valid {path.suffix or 'YAML'}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file '{path}' holds {type(tree).__name__}, expected a mapping")
    return tree


def load_tree(name: str | os.PathLike[str]) -> Tree:
    """Return the tree of a file or of a preset; a string without a suffix that is not a file names a preset.

    Raises:
        ConfigError: there is no such file or preset, or it does not parse.
    """
    if isinstance(name, str) and name == Path(name).stem and not Path(name).is_file():
        return load_preset(name)
    return read_tree(name)


def load_preset(name: str) -> Tree:
    """Return the tree of one of the package's presets.

    Raises:
        ConfigError: there is no such preset.
    """
    presets = files("dsq_ckpt.configs")
    names = sorted(entry.name.removesuffix(".yaml") for entry in presets.iterdir() if entry.name.endswith(".yaml"))
    if name not in names:
        raise ConfigError(f"there is no preset '{name}'; choose from {', '.join(names)}, or name a JSON or YAML file")
    return _parse_yaml((presets / f"{name}.yaml").read_text()) or {}


def _parse_yaml(text: str) -> Any:
    from dsq_ckpt.core.strict_yaml import parse_strict_yaml  # imports PyYAML, only where a configuration is a file

    return parse_strict_yaml(text)


def merge_trees(defaults: Tree, tree: Tree) -> Tree:
    """Merge `tree` over `defaults`; a codebook of another family inherits no keys of the default one."""
    result = dict(defaults)
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            same_family = codebook_family(value.get("fit", default.get("fit"))) == codebook_family(default.get("fit"))
            result[key] = merge_trees(default, value) if key != "codebook" or same_family else value
        else:
            result[key] = value
    return result


def diff_trees(tree: Tree, defaults: Tree) -> Tree:
    """Return the entries of `tree` that differ from `defaults`; `merge_trees(defaults, ...)` with them is `tree`."""
    changed: Tree = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if key in defaults and value == default:
            continue
        changed[key] = value
        if isinstance(value, dict) and isinstance(default, dict):
            same_family = codebook_family(value.get("fit")) == codebook_family(default.get("fit"))
            changed[key] = diff_trees(value, default) if key != "codebook" or same_family else value
    return changed


def iter_dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from iter_dotted_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def codebook_family(fit: Any) -> Any:
    """Return the family of a codebook's `fit`; codebooks of one family have the same keys."""
    return "kmeans" if fit == "lloyd" else fit
