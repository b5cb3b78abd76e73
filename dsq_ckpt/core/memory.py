"""Available memory of a process, limited by the system and by its control groups (cgroups)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _GroupFiles(NamedTuple):
    """Names of a control group's files for limit and usage, and of the reclaimable part of the usage in memory.stat."""

    limit: str
    usage: str
    droppable: str


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can allocate without taking memory from others; None if unknown (not Linux).

    Args:
        root: root of the file system.
    """
    meminfo = _read_numbers(root / "proc/meminfo")
    if "MemAvailable:" not in meminfo:
        return None
    free = [meminfo["MemAvailable:"] * 1024]
    for group, names in _control_groups(root):
        try:
            limit, usage = int((group / names.limit).read_text()), int((group / names.usage).read_text())
        except (OSError, ValueError):  # a path of another host, or no limit ("max")
            continue
        free.append(limit - usage + _read_numbers(group / "memory.stat").get(names.droppable, 0))
    return max(0, min(free))


def _control_groups(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield the control groups of this process that may limit its memory, and their parents."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (mounted / "memory", _V1) if controllers else (mounted, _V2)
        group = base / path.lstrip("/")
        yield group, names
        yield from ((parent, names) for parent in group.parents if parent.is_relative_to(base))


def _read_numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the word before it; empty if the file cannot be read."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}
