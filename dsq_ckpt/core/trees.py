"""Configurations as trees of plain values: read from files and presets, merged, and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dsq_ckpt.errors import ConfigError

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML without keys that are there twice, of which the last one would count without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Before `<<` puts keys of other mappings in, which may be there too, and `<<` itself may be repeated.
        _unique([(key.value, None) for key, _ in node.value
                 if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")])
        return node


def _unique(pairs: list[tuple[str, Any]]) -> Tree:
    """Return a mapping of keys and values.

    Raises:
        ValueError: a key is there twice.
    """
    tree: Tree = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"the key '{key}' is there twice in one mapping; keep one of them")
        tree[key] = value
    return tree


def read_tree(path: str | os.PathLike[str]) -> Tree:
    """Return the tree in a JSON or YAML file.

    Raises:
        ConfigError: it cannot be read, does not parse, holds no mapping, or has a key twice in one.
    """
    path = Path(os.path.expanduser(path))
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file '{path}' is no text; name a JSON or YAML file") from error
    try:
        tree = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"configuration file '{path}' is not valid {path.suffix or 'YAML'}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file '{path}' holds {type(tree).__name__}, expected a mapping")
    return tree


def named_tree(name: str | os.PathLike[str]) -> Tree:
    """Return the tree of a file or of a preset: a string without a suffix that names no file is a preset's name.

    Raises:
        ConfigError: there is no such file or preset, or it does not parse.
    """
    if isinstance(name, str) and name == Path(name).stem and not Path(name).is_file():
        return preset_tree(name)
    return read_tree(name)


def preset_tree(name: str) -> Tree:
    """Return the tree of a preset of the package.

    Raises:
        ConfigError: there is no such preset.
    """
    presets = files("dsq_ckpt.configs")
    names = sorted(entry.name.removesuffix(".yaml") for entry in presets.iterdir() if entry.name.endswith(".yaml"))
    if name not in names:
        raise ConfigError(f"there is no preset '{name}'; choose from {', '.join(names)}, or name a JSON or YAML file")
    return yaml.safe_load((presets / f"{name}.yaml").read_text()) or {}


def merged(defaults: Tree, tree: Tree) -> Tree:
    """Merge `tree` over `defaults`; a codebook of another family takes none of the default one's keys."""
    together = dict(defaults)
    for key, value in tree.items():
        known = defaults.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            same = family(value.get("fit", known.get("fit"))) == family(known.get("fit"))
            together[key] = merged(known, value) if key != "codebook" or same else value
        else:
            together[key] = value
    return together


def difference(tree: Tree, defaults: Tree) -> Tree:
    """Return the entries of `tree` that differ from `defaults`: `merged` over `defaults` they give `tree` again."""
    changed: Tree = {}
    for key, value in tree.items():
        known = defaults.get(key)
        if key in defaults and value == known:
            continue
        changed[key] = value
        if isinstance(value, dict) and isinstance(known, dict):
            same = family(value.get("fit")) == family(known.get("fit"))
            changed[key] = difference(value, known) if key != "codebook" or same else value
    return changed


def by_dotted_key(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from by_dotted_key(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def family(fit: Any) -> Any:
    """Return the family of a codebook; codebooks of one family have the same keys."""
    return "kmeans" if fit == "lloyd" else fit
