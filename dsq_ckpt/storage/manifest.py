"""The manifest of a checkpoint. Its appearance commits the checkpoint."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from dsq_ckpt.config.renamed import current_keys
from dsq_ckpt.core.regular_files import unreadable_error
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import map_concurrently
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError, LoadFailed
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import MAX_REQUESTS, get_storage
from dsq_ckpt.storage.container import FORMAT_VERSION, FileInfo
from dsq_ckpt.storage.manifest_names import RelativePath, SiblingName, is_plain_name
from dsq_ckpt.storage.manifest_requests import forget_on_all_threads, read_manifest_text
from dsq_ckpt.storage.manifest_text import NO_CHECKSUM, insert_checksum, parse_manifest_text
from dsq_ckpt.storage.other_formats import describe_other_format
from dsq_ckpt.storage.paths import explain_absence
from dsq_ckpt.storage.save_order import sort_by_save_order

MANIFEST = "manifest.json"
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_BASE_NAME = re.compile(r"[0-9a-f]{16}-\d{5,9}\.dsq")
MAX_CREATED = 1e11
"""Latest time of a save, in seconds since the epoch."""
_MAX_BYTES = 1 << 28  # of a manifest: a million files
_CACHE_SIZE, _MAX_CACHED_BYTES = 16, 1 << 18  # number of cached parsed manifests, bytes of the largest
Role = Literal["own", "ancestor", "index", "refinement", "older_refinement", "attachment"]
ANCESTOR_ROLES = ("ancestor", "older_refinement")  # of files that an earlier save wrote
REFINEMENT_ROLES = ("refinement", "older_refinement")
"""Roles of files that go when a checkpoint drops its refinement."""


class ManifestNotFlushed(OSError):
    """A manifest is renamed but not flushed: a power failure may undo it, so the files it replaces must be kept."""


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""64-bit signed integer."""


class ManifestFile(BaseModel):
    """File of a checkpoint.

    Roles: `own` and `refinement` are written by this save; `ancestor` and `older_refinement` are linked from earlier
    ones; `attachment` is a file of another format, such as DeepSpeed's.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    size: Int64
    checksum: str
    role: Role
    contents: str | None = None
    """Checksum of a data file's table of contents, which has those of its blocks; None in files of older versions."""
    held_by: SiblingName | None = None
    """Directory name of the checkpoint of the same run that holds the file, on object stores, where files of
    ancestors are not linked; None: the file is beside the manifest."""

    @model_validator(mode="after")
    def _check_holder(self) -> ManifestFile:
        if self.held_by is not None and not (self.role == "ancestor" and _BASE_NAME.fullmatch(self.name)):
            raise ValueError(f"{self.name!r} of the role '{self.role}' lies elsewhere; base files alone may")
        return self

    @model_serializer(mode="wrap")
    def _omit_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        if self.held_by is None:
            tree.pop("held_by", None)
        return tree

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name.startswith(".") or not is_plain_name(name):
            raise ValueError(f"{name!r} is not a plain file name; a manifest may not point outside its directory")
        return name

    def path_in(self, directory: Path) -> Path:
        """Return the path of the file in a checkpoint at `directory`."""
        return (directory if self.held_by is None else directory.parent / self.held_by) / self.name

    @classmethod
    def from_info(cls, info: FileInfo, role: Role) -> ManifestFile:
        return cls(name=info.name, size=info.size, checksum=info.checksum, role=role, contents=info.contents)


class KindSizes(BaseModel):
    """Bytes of the tensors of one kind: uncompressed, in base files, in refinement files."""

    model_config = ConfigDict(extra="allow")

    logical: Int64 = 0
    base: Int64 = 0
    refinement: Int64 = 0


class GroupReport(BaseModel):
    """Quantization errors and sizes of a group, over all ranks."""

    model_config = ConfigDict(extra="allow")

    elements: Int64
    levels: Int64
    delta: bool
    bits_per_element: float
    relative_error: float
    refined_error: float | None = None
    """The same with the refinement layer; None without one, or in manifests of older versions."""
    update_error: float | None = None
    """Relative error of the optimizer's next update after a restore; None except for first moments in its units."""
    worst_tensor: str | None = None
    worst_error: float | None = None
    """Largest relative error of a tensor, with the refinement layer if there is one; estimated from sketches."""
    step: float


_NUMERIC_KEYS = frozenset({
    "metric", "check_metric", "degradation", "check_degradation", "predicted_degradation", "noise", "restore_loses",
    "restore_may_lose", "run_lost", "predicted_bytes", "compensated", "refinement_bits", "evaluations", "checks",
    "seconds",
})
"""Keys of `Manifest.quality` with numeric values."""


class Manifest(BaseModel):
    """Manifest of a checkpoint: its files and properties. Locations of tensors are in the index."""

    model_config = ConfigDict(extra="allow")  # keys of a later version survive a rewrite by this one

    format: Literal["dsq_ckpt"] = "dsq_ckpt"
    version: int = FORMAT_VERSION
    checksum: str = NO_CHECKSUM
    """xxh3-64 of the file's bytes with sixteen zeros in place of the checksum."""
    save_id: str
    created: float = Field(ge=0, le=MAX_CREATED)
    """Seconds since the epoch; see `choose_creation_time`."""
    ranks: Int64
    parent: str | None
    """Save id of the parent checkpoint, None for a keyframe."""
    parent_name: SiblingName | None = None
    """Directory name of the parent at the time of the save; informational, not used for loading."""
    previous: str | None = None
    """Save id of the previous checkpoint of the run, also for a keyframe; used by retention."""
    previous_name: SiblingName | None = None
    """Its directory name in the same run directory; None if it is elsewhere."""
    replaced: list[tuple[str, str | None, SiblingName | None]] = []
    """Checkpoints that this directory held before, newest first: save id, `previous` and `previous_name` of each."""
    depth: Int64
    """Number of deltas from the keyframe to this checkpoint."""
    siblings: Int64 = 0
    """Number of consecutive checkpoints coded against its parent, up to this one; 0: a keyframe, or not counted."""
    refinement: Literal["kept", "dropped", "none"]
    pinned: bool = False
    files: list[ManifestFile]
    beside: list[RelativePath] = []
    """Companion files of a library such as Trainer, which belong to the checkpoint."""
    kinds: dict[str, KindSizes]
    groups: dict[str, GroupReport]
    nonfinite: list[str] = []
    quality: dict[str, Any] | None = None
    """Measurements of the search of this configuration (`Compressor`); None without a search."""
    lossy_resumes: Int64 = 0
    """Number of restores of the run from lossy state before this save."""
    excluded: dict[str, str] | None = None
    """Checksums of weights that the checkpoint leaves out, by name; see `join_sums`. None without `frozen=False`."""
    seconds: float = Field(ge=-1e11, le=1e11)
    config: dict[str, Any]
    writer: dict[str, str]

    @field_validator("save_id", "parent", "previous")
    @classmethod
    def _check_save_id(cls, save_id: str | None) -> str | None:
        if save_id is not None and _SAVE_ID.fullmatch(save_id) is None:
            raise ValueError(f"{save_id!r} is not a save id: 16 lower-case hexadecimal digits")
        return save_id

    @field_validator("config")
    @classmethod
    def _update_config_keys(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Rename keys of earlier versions to their current names."""
        return current_keys(config, silent=True)

    @field_validator("quality")
    @classmethod
    def _check_quality(cls, quality: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (quality or {}).items():
            if name in _NUMERIC_KEYS and not (value is None or (isinstance(value, int | float) and abs(value) < 1e300)):
                raise ValueError(f"'{name}' is {str(value)[:100]!r}, expected a number")
            if name == "chosen" and not isinstance(value, dict | None):
                raise ValueError(f"'chosen' is {str(value)[:100]!r}, expected an object")
        return quality

    @model_validator(mode="after")
    def _check_files(self) -> Manifest:
        names = [file.name for file in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is named twice")
        if sum(file.role == "index" for file in self.files) != 1:
            raise ValueError("a checkpoint has exactly one index")
        if self.version < 9:  # an empty dict was written without `frozen=False`, too
            self.excluded = self.excluded or None
        return self

    def get_older_save_ids(self) -> set[str]:
        """Return the save ids of checkpoints known to be older: the previous one, and those whose files it links."""
        linked = {file.name[:16] for file in self.files if file.role in ANCESTOR_ROLES}
        return (linked | {self.previous or ""}) - {self.save_id, ""}

    @property
    def index(self) -> ManifestFile:
        return next(file for file in self.files if file.role == "index")

    @property
    def lossy(self) -> bool:
        """Return whether restored values may differ from the saved values."""
        return bool(self.groups) or any(kind != "exact" for kind in self.kinds)

    def get_setting(self, *keys: str) -> Any:
        """Return a value of the configuration by its nested keys; None if it is missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def lossy_kinds(self) -> set[str]:
        """Kinds of quantized tensors: the prefixes of group names."""
        return {group.partition("/")[0] for group in self.groups}

    def sum_bytes(self, *roles: str) -> int:
        """Return the total size of the files of these roles."""
        return sum(file.size for file in self.files if file.role in roles)

    def write(
        self, directory: Path, *, exclusive: bool, fsync: bool, before_publish: Callable[[], object] = lambda: None
    ) -> None:
        """Commit the checkpoint by writing the manifest atomically.

        Args:
            exclusive: fail if another save has committed a checkpoint here.
            before_publish: called when all is written, right before it appears.

        Raises:
            FileExistsError: with `exclusive`, there is a manifest already.
            ManifestNotFlushed: the manifest is written, but its directory cannot be flushed to the device.
            OSError: the manifest cannot be written.
        """
        with get_storage(directory).create(directory / MANIFEST, fsync=fsync) as file:
            file.stream.write(self.to_bytes())
            file.complete()
            before_publish()
            file.publish(exclusive)
            forget_on_all_threads()
            if fsync:
                try:
                    get_storage(directory).flush(directory)
                except OSError as error:
                    raise ManifestNotFlushed(error.errno, error.strerror, str(directory)) from error

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        return insert_checksum(self.model_copy(update={"checksum": NO_CHECKSUM}).model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint directory. The result is cached and shared: do not modify it.

        Raises:
            CheckpointNotFound: there is no complete dsq_ckpt checkpoint.
            CorruptCheckpoint: the manifest does not parse, or its checksum is wrong.
            LoadFailed: the manifest cannot be read, such as for missing permissions.
            UnsupportedFormat: it was written by a newer version.
        """
        path = directory / MANIFEST
        try:
            text = read_manifest_text(path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(_explain_missing(directory)) from error
        except OSError as error:
            raise unreadable_error(path, error) from error
        return _parse_cached(text, path) if len(text) <= _MAX_CACHED_BYTES else _parse(text, path)


def _parse(text: bytes, path: Path) -> Manifest:
    tree = parse_manifest_text(text, path)
    try:
        return Manifest.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptCheckpoint(f"'{path}': {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


_parse_cached = functools.lru_cache(_CACHE_SIZE)(_parse)  # a save reads its parent's manifest several times


def is_complete(directory: Path) -> bool:
    """Return whether a directory has a committed checkpoint; its bytes are not checked.

    Raises:
        LoadFailed: the directory cannot be read.
    """
    path = directory / MANIFEST
    try:
        return get_storage(path).exists(path)
    except OSError as error:
        raise LoadFailed(f"'{path}': whether a checkpoint is there is unknown: {error.strerror}") from error


def iter_checkpoints(
    run: Path, on_unreadable: Callable[[Path, DSQError], object] | None = None
) -> Iterator[tuple[Path, Manifest]]:
    """Yield the complete checkpoints directly below a run directory, in the order of their saves.

    A checkpoint comes after its previous checkpoint and after those whose files it links. Times, whose clocks may go
    back, order checkpoints that are not related in this way.

    Args:
        run: run directory, which need not exist.
        on_unreadable: called with the directory and error of a checkpoint with an unreadable manifest; None: raise.

    Raises:
        DSQError: a manifest cannot be read, and `on_unreadable` is None.
    """
    checkpoints = []
    for entry, manifest in _iter_manifests(run):
        if isinstance(manifest, Manifest):
            checkpoints.append((entry, manifest))
        elif isinstance(manifest, CheckpointNotFound):
            pass  # removed meanwhile
        elif on_unreadable is None:
            raise manifest
        else:
            on_unreadable(entry, manifest)
    yield from sort_by_save_order(checkpoints)


def _iter_manifests(run: Path) -> Iterator[tuple[Path, Manifest | DSQError]]:
    """Yield the directories of a run that may be checkpoints, with the manifest or the error of reading it."""
    if is_remote(run):
        below = [run / entry.name for entry in get_storage(run).list_entries(run) if entry.is_directory]
        yield from zip(below, map_concurrently(_read_or_error, below, MAX_REQUESTS), strict=True)
        return
    for entry in run.iterdir() if run.is_dir() else ():
        if entry.name == "lost+found" or is_hidden(entry.name):  # of a file system, whose root this may be; a copy
            continue
        try:
            if is_complete(entry):
                yield entry, Manifest.read(entry)
        except DSQError as error:
            yield entry, error


def _read_or_error(directory: Path) -> Manifest | DSQError:
    try:
        return Manifest.read(directory)
    except DSQError as error:
        return error


def _explain_missing(directory: Path) -> str:
    remote = is_remote(directory)
    if not remote and (inside := [entry.name for entry, _ in iter_checkpoints(directory, lambda *_: None)]):
        return f"'{directory}' is a run directory, not a checkpoint; the newest checkpoint in it is '{inside[-1]}'"
    if description := describe_other_format(directory):
        return f"'{directory}' {description}"
    if remote:
        return _explain_missing_remote(directory)
    if not directory.exists():
        return f"'{directory}' {explain_absence(directory)}; name a checkpoint directory"
    return f"'{directory}' holds no {MANIFEST}: not a dsq_ckpt checkpoint, or one that did not complete or was removed"


def _explain_missing_remote(directory: Path) -> str:
    entries = get_storage(directory).list_entries(directory)
    if not entries:
        return f"nothing is at '{directory}'; name a checkpoint"
    inside = [entry.name for entry in entries if entry.is_directory]
    if inside:
        return f"'{directory}' is a run, not a checkpoint; `dsq_ckpt.latest` gives the newest checkpoint in it"
    return f"'{directory}' holds no {MANIFEST}: not a dsq_ckpt checkpoint, or one that did not complete or was removed"
