"""Registries of items by name, which other packages can extend."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from dsq_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Mapping of names to registered items.

    For an unregistered name, the entry point of that name in an installed package is imported; this must register it.
    So any process can write a checkpoint without an import by the user.

    Attributes:
        kind: name of the kind of items, for messages.
        group: group of the entry points.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Register an item and return it; the same item may be registered again, as by a reloaded module.

        Raises:
            ConfigError: another item has the name.
        """
        before = self._items.get(name)
        if before is not None and _get_origin(before) != _get_origin(item):
            raise ConfigError(f"{self.kind} '{name}' is registered already, as {before!r}: choose another name")
        self._items[name] = item
        return item

    def load(self) -> None:
        """Import all entry points, ignoring failures, so that messages can list their names."""
        for name in self._entry_points():
            with suppress(ConfigError):
                self.get(name)

    def __getitem__(self, name: str) -> T:
        """Return the item of this name.

        Raises:
            KeyError: there is none.
            ConfigError: the entry point of this name cannot be imported, or does not register it.
        """
        if name not in self._items and (entry := self._entry_points().get(name)) is not None:
            try:
                entry.load()
            except Exception as error:
                raise ConfigError(f"{self.kind} '{name}': {entry.value} cannot be imported: {error!r}") from error
            if name not in self._items:
                raise ConfigError(f"{self.kind} '{name}': importing {entry.value} registers nothing of that name")
        return self._items[name]

    def __setitem__(self, name: str, item: T) -> None:
        """Set the item of this name, whether or not there was one."""
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        """Remove the item of this name."""
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the registered names, in the order of registration."""
        return iter(self._items)

    def __len__(self) -> int:
        """Return the number of registered names."""
        return len(self._items)

    def _entry_points(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points

        return {entry.name: entry for entry in entry_points(group=self.group)}


def _get_origin(item: object) -> object:
    """Return module and qualified name of a class; other items are compared themselves."""
    return (item.__module__, item.__qualname__) if isinstance(item, type) else item
