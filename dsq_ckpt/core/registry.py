"""Things that are looked up by name, and that other packages may add."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from dsq_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Registered things by name.

    A name that is not registered is looked for among the entry points of installed packages: the one of that name is
    imported, which must register it. So a checkpoint can be written in any process, without an import of the user's.

    Attributes:
        what: Is registered, for messages.
        group: Of the entry points.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Add something, and return it; the same may be registered again, as a module that is reloaded does.

        Raises:
            ConfigError: The name is taken.
        """
        before = self._items.get(name)
        if before is not None and _get_origin(before) != _get_origin(item):
            raise ConfigError(f"{self.kind} '{name}' is registered already, as {before!r}: choose another name")
        self._items[name] = item
        return item

    def load(self) -> None:
        """Import all entry points, as far as that works, so that messages can name them."""
        for name in self._entry_points():
            with suppress(ConfigError):
                self.get(name)

    def __getitem__(self, name: str) -> T:
        """Return what has this name.

        Raises:
            KeyError: Nothing has it.
            ConfigError: An entry point has it, and does not register it.
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
        """Put something in place of what had the name."""
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        """Forget what has this name."""
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
    """Return where a class was defined; other things are compared themselves."""
    return (item.__module__, item.__qualname__) if isinstance(item, type) else item
