"""`FileSystemWriter` and ours in its exact preset, side by side: the same cases run on both, and must give the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dsq_ckpt


@dataclass
class Side:
    """A storage that cases are run on.

    Attributes:
        writer: makes a storage writer of a path.
        reader: makes a storage reader of a path.
        root: an empty directory.
        calls: of the storage, in order, where `recorded` made the writer.
    """

    writer: Callable[..., Any]
    reader: Callable[..., Any]
    root: Path
    calls: list[Any] = field(default_factory=list)

    def path(self, name: str = "a") -> Path:
        return self.root / name

    def load(self, like: dict[str, Any], name: str = "a", **options: Any) -> dict[str, Any]:
        """What `dcp.load` makes of a state dict."""
        dcp.load(like, storage_reader=self.reader(self.path(name)), **options)
        return like


def sides(root: Path) -> Iterator[Side]:
    """Both, each with a directory of its own below `root`."""
    yield Side(dcp.FileSystemWriter, dcp.FileSystemReader, root / "plain")
    yield Side(
        lambda path=None, **options: dsq_ckpt.DSQStorageWriter(path, "exact", **options), dsq_ckpt.DSQStorageReader,
        root / "ours",
    )


def state() -> dict[str, Any]:
    """Tensors of several shapes and dtypes, nested, and objects."""
    g = torch.Generator().manual_seed(0)
    tied = torch.randn(40, 30, generator=g)
    return {
        "model": {"weight": torch.randn(80, 64, generator=g), "half": torch.randn(70, 66, generator=g).bfloat16(),
                  "bias": torch.randn(64, generator=g), "tied": tied, "tied too": tied},
        "turned": torch.randn(50, 60, generator=g).t(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "list": [torch.arange(5), {"deep": torch.ones(3)}], "step": 7, "settings": {"lr": 0.1, "names": ("a", "b")},
        "counts": torch.arange(10, dtype=torch.int32), "mask": torch.tensor([True, False]),
    }


def blank(value: Any) -> Any:
    """The same tree, with nothing of its values."""
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def ruined(value: Any) -> None:
    """What training does right after an asynchronous save began."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            ruined(entry)
    elif isinstance(value, torch.Tensor):
        value.zero_()


def plain(value: Any) -> Any:
    """Values that can be compared with ==: tensors become dtype, shape and numbers."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return str(whole.dtype), tuple(whole.shape), whole.tolist()
    return value


def summarize(metadata: Metadata) -> Any:
    """What DCP's metadata tell of a state dict."""
    entries = {
        name: (tuple(entry.size), str(entry.properties.dtype), sorted(
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
        )) if isinstance(entry, TensorStorageMetadata) else "object"
        for name, entry in metadata.state_dict_metadata.items()
    }
    return entries, plain(metadata.planner_data)


def outcome(work: Callable[[], Any]) -> Any:
    """What the work gives, or the kind of error that DCP makes of what it raises."""
    try:
        return plain(work())
    except CheckpointException as error:
        return f"fails on ranks {sorted(error.failures)}"


WRITING = (
    "reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data",
    "finish",
)
READING = ("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def agree(root: Path, case: Callable[[Side], Any]) -> Any:
    """The outcome of a case, which is the same on both sides."""
    torch_outcome, dsq_outcome = (outcome(lambda side=side: case(side)) for side in sides(root))  # type: ignore[misc]
    assert dsq_outcome == torch_outcome
    return dsq_outcome


def recorded(side: Side, plain: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Makes writers or readers, as `plain` does, which record these of DCP's calls in `side.calls`."""
    def make(*args: Any, **options: Any) -> Any:
        own = plain(*args, **options)
        kind = type(own)

        def recording(name: str) -> Callable[..., Any]:
            @functools.wraps(getattr(kind, name))  # DCP looks at the parameters
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                # FileSystemWriter's `finish` asks itself; only DCP's own calls are compared.
                outermost, self.deep = not getattr(self, "deep", 0), getattr(self, "deep", 0) + 1
                if outermost:
                    side.calls.append((name, *map(summary, args), *sorted((k, summary(v)) for k, v in kwargs.items())))
                try:
                    return getattr(kind, name)(self, *args, **kwargs)
                finally:
                    self.deep -= 1

            return call

        own.__class__ = type(kind.__name__, (kind,), {name: recording(name) for name in names})
        return own

    return make


def summary(value: Any) -> Any:
    """What of an argument is the same for every storage."""
    if hasattr(value, "items") and isinstance(value.items, list):
        items = [getattr(item, "index", None) or item.dest_index for item in value.items]
        return "plan", *((index.fqn, tuple(index.offset or ())) for index in items)
    if isinstance(value, list):
        return [summary(entry) for entry in value]
    if isinstance(value, Metadata):
        return summarize(value)
    if hasattr(value, "index") and hasattr(value, "size_in_bytes"):
        return "result", value.index.fqn, tuple(value.index.offset or ())
    if isinstance(value, Path):
        return value.name
    return value if isinstance(value, str | int | bool | None) else type(value).__name__
