"""Export of checkpoints to formats that can be read without `dsq_ckpt`: plain DCP, `torch.save`, safetensors.

An export runs in one process, for a checkpoint of any number of ranks. Values are those that `dsq_ckpt.load` returns.
DCP and safetensors files are written tensor by tensor, with one tensor in memory; a `torch.save` file needs all of them
in memory. A tag of DeepSpeed has further state in DeepSpeed's own files, as a warning says; it is refused if all of its
state is there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.convert.causes import find_cause
from dsq_ckpt.core.aliases import flat_bytes
from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.core.nesting import Nesting, restore_parameter_numbers
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CorruptCheckpoint, DSQError
from dsq_ckpt.storage.atomic_io import create_directory, create_file, sync_directory
from dsq_ckpt.storage.attachments import list_attachments, refuse_without_tensors, warn_about_attachments
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.paths import expand_path, resolve_local_path
from dsq_ckpt.storage.record_fields import parse_dtype
from dsq_ckpt.storage.refinement import RefinementOption, check_refinement, uses_refinement
from dsq_ckpt.storage.target_directory import refuse_existing

StrPath = str | os.PathLike[str]
Progress = Callable[[int], None]
"""Called with the number of uncompressed bytes of each exported tensor."""


class ExportError(DSQError):
    """An export that the target format does not support, or a target that may not be replaced."""


@dataclass
class Exported:
    """The result of an export."""

    path: Path
    tensors: int
    bytes: int
    """Uncompressed bytes of all tensors."""
    refined: bool
    """Whether the refinement layer was used."""
    left_out: list[str] = field(default_factory=list)
    """Objects that the format does not support; names that have a path but no value in the checkpoint, as when a
    planner saves a part; and DeepSpeed's files."""


def export_dcp(
    source: StrPath, target: StrPath, *, refinement: RefinementOption = "auto", overwrite: bool = False,
    part: str | None = None, progress: Progress | None = None,
) -> Exported:
    """Write a plain DCP directory, which `dcp.load` can load into the saved state dict.

    Objects are copied as the bytes that DCP serialized; none is unpickled.

    Args:
        source: a checkpoint directory.
        target: the directory to create.
        refinement: as for `dsq_ckpt.load`.
        overwrite: replace a plain DCP checkpoint at `target`.
        part: export only entries below this key of the state dict, with names without it; None: everything.
        progress: called after every tensor.

    Raises:
        CheckpointExists: `target` exists, without `overwrite`.
        ExportError: with `overwrite`, `target` is not a plain DCP checkpoint; or nothing is below `part`.
        OSError: `target` cannot be written, such as on a full disk; nothing of it is left.
    """
    goal = Path(os.path.normpath(resolve_local_path(target)))
    refuse_existing(goal, overwrite)
    if overwrite and os.path.lexists(goal) and not _is_plain_dcp(goal):
        raise ExportError(f"'{goal}' is not a plain DCP checkpoint and is not overwritten; choose another target")
    with OpenedCheckpoint(source, refinement, progress, part, done="exported") as opened:
        flat: dict[str, Any] = {
            fqn: torch.empty(tensor["shape"], dtype=parse_dtype(tensor["dtype"]), device="meta")
            for fqn, tensor in opened.tensors.items()
        }
        flat.update(dict.fromkeys(opened.objects))
        with create_directory(goal, overwrite) as hidden:
            writer = dcp.FileSystemWriter(hidden, single_file_per_rank=True, thread_count=1)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # "assuming a single process", which is intended
                    dcp.save(flat, storage_writer=writer, planner=_StreamingPlanner(opened), no_dist=True)
            except CheckpointException as error:
                raise find_cause(error) from error
            sync_directory(hidden)
        return opened.result(goal)


def export_torch(
    source: StrPath, file: StrPath, *, refinement: RefinementOption = "auto", overwrite: bool = False,
    allow_pickle: bool = False, part: str | None = None, progress: Progress | None = None,
) -> Exported:
    """Write a `torch.save` file with the saved nested state dict; all tensors are in memory at once.

    Args:
        source: a checkpoint directory.
        file: the file to write.
        refinement: as in `dsq_ckpt.load`.
        overwrite: replace `file`.
        allow_pickle: unpickle objects of any class, which can run code of whoever wrote the checkpoint.
        part: export only what is below this key of the state dict, by names without it; None: everything.
        progress: called after every tensor.

    Raises:
        CheckpointExists: `file` exists.
        ExportError: an object is more than plain data, without `allow_pickle`; or nothing is below `part`.
        OSError: `file` cannot be written, such as on a full disk; nothing of it is left.
    """
    goal = Path(os.path.normpath(resolve_local_path(file)))
    refuse_existing(goal, overwrite)
    with OpenedCheckpoint(source, refinement, progress, part, done="exported") as opened:
        nested = opened.to_nested(allow_pickle)
        with create_file(goal) as stream:
            try:
                torch.save(nested, stream)
            except RuntimeError as error:
                raise find_cause(error) from error
        return opened.result(goal)


def export_safetensors(
    source: StrPath, file: StrPath, *, refinement: RefinementOption = "auto", overwrite: bool = False,
    part: str | None = None, progress: Progress | None = None,
) -> Exported:
    """Write all tensors to a safetensors file, with their flat names.

    The format does not support objects: their names are in the result, and in the file's metadata as the JSON list
    `left_out`. The `safetensors` package is not used, since it needs all tensors in memory.

    Args:
        source: a checkpoint directory.
        file: the file to write.
        refinement: as in `dsq_ckpt.load`.
        overwrite: replace `file`.
        part: export only what is below this key of the state dict, by names without it; None: everything.
        progress: called after every tensor.

    Raises:
        CheckpointExists: `file` exists.
        ExportError: safetensors has no name for a tensor's dtype; or nothing is below `part`.
        OSError: `file` cannot be written, such as on a full disk; nothing of it is left.
    """
    goal = Path(os.path.normpath(resolve_local_path(file)))
    refuse_existing(goal, overwrite)
    with OpenedCheckpoint(source, refinement, progress, part, done="exported") as opened:
        # Wide dtypes first, so that every tensor is aligned to its item size, as memory-mapping readers need.
        names = sorted(opened.tensors, key=lambda fqn: (-opened.dtype(fqn).itemsize, fqn))
        left_out = json.dumps([*opened.objects, *opened.files])
        metadata = {"format": "pt", "save_id": opened.checkpoint.manifest.save_id, "left_out": left_out}
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for fqn in names:
            start, end = end, end + opened.size(fqn)
            shape = opened.tensors[fqn]["shape"]
            header[fqn] = {"dtype": _safetensors_dtype(fqn, opened), "shape": shape, "data_offsets": [start, end]}
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        with create_file(goal) as stream:
            stream.write(len(head).to_bytes(8, "little") + head)
            for fqn in names:
                tensor = opened.tensor(fqn)
                if tensor.numel():
                    stream.write(flat_bytes(tensor).numpy().data)
        result = opened.result(goal)
        result.left_out += opened.objects
        return result


_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}


class OpenedCheckpoint:
    """A checkpoint opened for export: whole tensors by name, joined from the chunks of all ranks.

    Args:
        path: a checkpoint directory.
        refinement: as for `dsq_ckpt.load`.
        progress: called after every whole tensor.
        part: restrict it to entries below this key of the state dict, with names without it; None: everything.
        done: participle for messages, such as "exported", that some or all tensors are in DeepSpeed's own files; None:
            no such message.

    Attributes:
        checkpoint: the checkpoint.
        refined: whether the refinement layer is used.
        paths: nesting of the state dict; None: the planner stored no paths.
        tensors: index entries of tensors, by name.
        objects: names of objects.
        files: names of DeepSpeed's own files, in a tag of DeepSpeed.

    Raises:
        ExportError: nothing is below `part`; or, with `done`, all tensors are in `files`.
    """

    def __init__(
        self, path: StrPath, refinement: RefinementOption, progress: Progress | None, part: str | None = None, *,
        done: str | None = None,
    ) -> None:
        self.checkpoint = Checkpoint(expand_path(path))
        self.files = [file.name for file in list_attachments(self.checkpoint.manifest)]
        try:
            if done is not None:
                refuse_without_tensors(self.checkpoint, done, ExportError)
                warn_about_attachments(self.checkpoint, done)
            self.refined = uses_refinement(self.checkpoint.manifest, check_refinement(refinement), path)
            with self.checkpoint.translate_errors():
                self.paths = Nesting.from_json(self.checkpoint.index)
                self.tensors: dict[str, dict[str, Any]] = self.checkpoint.index["tensors"]
                self.objects: list[str] = sorted(self.checkpoint.index["objects"])
                self._stored: dict[str, str] = {}
                if part is not None:
                    self._select_part(part)
        except BaseException:
            self.checkpoint.close()
            raise
        self._progress = progress
        storage = StorageConfig()
        self._workers = Workers(storage.thread_count(), storage.block_elements)

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        self._workers.__exit__()
        self.checkpoint.close()

    def _select_part(self, part: str) -> None:
        """Restrict it to entries below a key, and set `_stored` to their names in the checkpoint."""
        below = None if self.paths is None else self.paths.below((part,))
        if below is None or self.paths is None:
            parts = sorted({str(path[0]) for path in self.paths.values()}) if self.paths is not None else []
            raise ExportError(
                f"'{self.checkpoint.directory}' has nothing below '{part}'; at its top level are "
                + (", ".join(map(repr, parts)) or "keys that its planner did not tell")
            )
        self._stored = {".".join(map(str, path)): name for name, path in below.items()}
        self.paths = Nesting({name: below[stored] for name, stored in self._stored.items()}, below.typed, below.empty)
        self.tensors = {name: self.tensors[old] for name, old in self._stored.items() if old in self.tensors}
        objects = set(self.objects)
        self.objects = sorted(name for name, old in self._stored.items() if old in objects)

    def to_nested(self, allow_pickle: bool) -> dict[str, Any]:
        """Return all tensors and objects in memory, nested as the saved state dict; flat if its nesting is unknown."""
        expect_flags(allow_pickle=allow_pickle)
        flat: dict[str, Any] = {fqn: self.object(fqn, allow_pickle) for fqn in self.objects}
        flat.update((fqn, self.tensor(fqn)) for fqn in self.tensors)
        flat = {fqn: flat[fqn] for fqn in self.order() if fqn in flat}
        with self.checkpoint.translate_errors():
            root = flat if self.paths is None else self.paths.unflatten(flat)
            restore_parameter_numbers(root, {id(root)})
            return root

    def order(self) -> list[str]:
        """Return all names, in the order of the saved state dict if it is known."""
        return list(self.paths) if self.paths is not None else [*self.tensors, *self.objects]

    def dtype(self, fqn: str) -> torch.dtype:
        return parse_dtype(self.tensors[fqn]["dtype"])

    def size(self, fqn: str) -> int:
        """Return the number of uncompressed bytes of a tensor."""
        return torch.Size(self.tensors[fqn]["shape"]).numel() * self.dtype(fqn).itemsize

    def tensor(self, fqn: str) -> torch.Tensor:
        """Return a whole tensor.

        Raises:
            CorruptCheckpoint: its chunks do not cover it.
        """
        with self.checkpoint.translate_errors():
            result = torch.empty(self.tensors[fqn]["shape"], dtype=self.dtype(fqn), device="cpu")
            filled = 0
            for offsets, shape, _, _ in self.tensors[fqn]["chunks"]:
                target = result
                for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
                    target = target.narrow(dim, start, length)
                target.copy_(self.chunk(fqn, tuple(offsets)))
                filled += target.numel()
        if filled != result.numel():
            raise CorruptCheckpoint(f"'{fqn}': chunks hold {filled} of {result.numel()} elements")
        if self._progress is not None:
            self._progress(result.nbytes)
        return result

    def chunk(self, fqn: str, offsets: tuple[int, ...]) -> torch.Tensor:
        """Return a stored chunk of a tensor."""
        with self.checkpoint.translate_errors():
            ref = self.checkpoint.find_record(self._stored.get(fqn, fqn), offsets)
            return self.checkpoint.decode_tensor(ref, self.refined, self._workers)

    def object_bytes(self, fqn: str) -> bytes:
        """Return the bytes of an object that DCP serialized."""
        with self.checkpoint.translate_errors():
            return self.checkpoint.read_object(self.checkpoint.find_record(self._stored.get(fqn, fqn), None))

    def object(self, fqn: str, allow_pickle: bool) -> Any:
        """Return an object; without `allow_pickle`, only plain data is unpickled."""
        try:
            return torch.load(io.BytesIO(self.object_bytes(fqn)), map_location="cpu", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            raise ExportError(
                f"object '{fqn}' is more than plain data; unpickling it can run code. If you trust this checkpoint, "
                "pass allow_pickle=True; export to DCP or safetensors unpickles nothing"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ExportError(
                f"object '{fqn}' needs code that is not here: {error}; export where the training code is installed, "
                "or export to DCP, which unpickles nothing"
            ) from error
        except DSQError:
            raise
        except Exception as error:  # unpickling can raise any exception
            raise CorruptCheckpoint(
                f"object '{fqn}' of '{self.checkpoint.directory}' cannot be unpickled: {error!r}"
            ) from error

    def result(self, path: Path) -> Exported:
        stored = {*self.tensors, *self.objects}
        without_value = [fqn for fqn in self.paths or () if fqn not in stored]
        left_out = [*without_value, *self.files]
        return Exported(path, len(self.tensors), sum(self.size(fqn) for fqn in self.tensors), self.refined, left_out)


class _StreamingPlanner(DefaultSavePlanner):
    """A planner of a state dict of meta tensors, which decodes the data of each item when DCP writes it."""

    def __init__(self, source: OpenedCheckpoint) -> None:
        super().__init__(flatten_state_dict=source.paths is not None)
        self._source = source

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._source.paths is not None:
            self.mappings = dict(self._source.paths)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._source.tensor(index.fqn)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._source.object_bytes(write_item.index.fqn))
        return self.lookup_object(write_item.index)


def _safetensors_dtype(fqn: str, source: OpenedCheckpoint) -> str:
    name = source.tensors[fqn]["dtype"]
    if name not in _SAFETENSORS_DTYPES:
        raise ExportError(f"'{fqn}' is {name}, for which safetensors has no name; export to DCP or torch")
    return _SAFETENSORS_DTYPES[name]


def _is_plain_dcp(directory: Path) -> bool:
    """Return whether a directory holds a plain DCP checkpoint and no other files."""
    if directory.is_symlink() or not (directory / ".metadata").is_file():
        return False
    return all(entry.name == ".metadata" or entry.suffix == ".distcp" for entry in directory.iterdir())
