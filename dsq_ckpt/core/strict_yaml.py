"""YAML without duplicate keys."""

from __future__ import annotations

from typing import Any

import yaml

from dsq_ckpt.core.strict_json import make_unique_mapping


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, of which the last one would silently be used."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Check before `<<` merges other mappings, whose keys may be overridden; `<<` itself may be repeated.
        make_unique_mapping([(key.value, None) for key, _ in node.value
                if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")])
        return node


def parse_strict_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: the text does not parse, or a key occurs twice in one mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
