"""Atomic checkpoint directories of other libraries.

Other libraries write the files of a checkpoint one after the other to the directory that a restart looks for. Here all
files are written to a hidden directory beside it, which a restart ignores and `dsq gc` removes after a crash.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dsq_ckpt.api import background
from dsq_ckpt.api.saving import async_save, save
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import in_user_code
from dsq_ckpt.distributed.comm import RankUnreachable, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.engine.result import OnSave, SaveResult, announce
from dsq_ckpt.engine.retention import retire
from dsq_ckpt.errors import CheckpointNotFound, DSQError, LoadFailed, SaveFailed
from dsq_ckpt.storage.atomic_io import hidden_name, replace_directory, shorten_name
from dsq_ckpt.storage.companion_files import LIBRARY_NAMES, copy_other_files, flush_other_files, walk_files
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete
from dsq_ckpt.storage.paths import resolve_local_path
from dsq_ckpt.storage.target_directory import refuse_within_checkpoint


class StagedCheckpoint:
    """An unpublished checkpoint directory; the context manager removes it unless it was published.

    All methods are collective over the default process group, and fail on all ranks if they fail on one rank.

    Args:
        target: directory to publish, on storage that all ranks share. An existing checkpoint is replaced; other files
            in its directory are kept.
        config: configuration of the save.
        on_save: function that is called with the `SaveResult` on rank 0 after the directory is published.
        asynchronous: `save` returns as soon as training may go on; call `publish_in_background` afterwards.

    Raises:
        ConfigError: `target` is a URL.

    Attributes:
        target: directory to publish.
        files_directory: directory for files of the library, with the name of `target`, in a hidden directory.
    """

    def __init__(
        self, target: str | os.PathLike[str], config: DSQConfig, on_save: OnSave | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.target, self._config, self._on_save = resolve_local_path(target), config, on_save
        self._asynchronous, name = asynchronous, self.target.name
        if self.target.is_symlink():
            self.target = self.target.resolve()
        self._comm = communicator(None)
        token = gather_from_all_ranks(self._comm, lambda: uuid.uuid4().hex)[0]
        self._hidden_directory = hidden_name(self.target, token[:8])
        self._files_parent = hidden_name(self.target, token[8:16])
        self.files_directory = self._files_parent / name
        self._result: SaveResult | None = None
        self._save_future: Future[SaveResult] | None = None
        self._is_published = False

    def __enter__(self) -> StagedCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._is_published or isinstance(error, RankUnreachable):  # other ranks may still write
            return
        if self._save_future is not None and self._save_future.exception() is None:  # waits for the save
            self._result = self._save_future.result()
        if self._result is not None:
            default_history().remove(self._result.save_id)
        if self._comm.rank == 0:
            for directory in (self._hidden_directory, self._files_parent):
                shutil.rmtree(directory, ignore_errors=True)

    def save(
        self, collect: Callable[[], dict[str, Any]], *, model: nn.Module | None = None, pinned: bool = False
    ) -> None:
        """Save the state dict that `collect` returns, as a delta to the last checkpoint of the run.

        Raises:
            DSQError: the save failed.
        """
        def prepare_state() -> dict[str, Any]:
            self._prepare_directories()
            return collect()

        state = run_on_all_ranks(self._comm, prepare_state)
        options: dict[str, Any] = {"config": self._config, "model": model, "pinned": pinned}
        if self._asynchronous:
            self._save_future = async_save(state, self._hidden_directory, **options)
        else:
            self._result = save(state, self._hidden_directory, **options)

    @property
    def is_saved(self) -> bool:
        """Whether `save` has returned."""
        return self._result is not None or self._save_future is not None

    def write(self, write_files: Callable[[Path], object]) -> None:
        """Call `write_files` with `files_directory` on every rank, to write files of the library.

        Raises:
            SaveFailed: `write_files` failed on a rank.
        """
        def write() -> None:
            self.files_directory.mkdir(parents=True, exist_ok=True)
            with in_user_code():  # the library calls objects of the user
                write_files(self.files_directory)

        run_on_all_ranks(self._comm, write)

    def publish_in_background(self, on_publish: Callable[[], object]) -> Future[None]:
        """Publish in a thread, once the save in the background is complete; the next save waits for it.

        Args:
            on_publish: function that is called in the thread on rank 0 after the directory is published.

        Returns:
            A future; if publishing failed on one rank, `result()` raises an error on all ranks.
        """
        self._comm = communicator(background.get_group(None))  # training uses the default group
        executor = ThreadPoolExecutor(1, "dsq_ckpt-publish")
        future = executor.submit(self._wait_and_publish, on_publish)
        executor.shutdown(wait=False)
        background.set_pending(future)
        return future

    def _wait_and_publish(self, on_publish: Callable[[], object]) -> None:
        assert self._save_future is not None, "save comes first"
        with self:
            self._result = run_on_all_ranks(self._comm, self._save_future.result)
            self.publish(on_publish)

    def publish(self, on_publish: Callable[[], object] = lambda: None) -> None:
        """Rename the directory to `target`, then drop refinements of older checkpoints as configured.

        Args:
            on_publish: function that is called on rank 0 after the directory is published.

        Raises:
            SaveFailed: the directory cannot be flushed or renamed, or `on_publish` failed.
        """
        assert self._result is not None, "save comes first"
        run_on_all_ranks(self._comm, self._rename_to_target)
        self._is_published = True
        finalize_save(self._result, self.target, self._config, self._comm.rank, self._on_save)
        if self._comm.rank == 0:
            with suppress(OSError):  # some libraries remove old checkpoints by this time
                os.utime(self.target)
        run_on_all_ranks(self._comm, lambda: on_publish() if self._comm.rank == 0 else None)

    def _prepare_directories(self) -> None:
        """Create directories, and remove hidden ones that killed saves of the same checkpoint left.

        Raises:
            SaveFailed: `target` is not a directory, contains checkpoints, or lies in a checkpoint.
        """
        if self._comm.rank == 0:
            refuse_within_checkpoint(self.target)  # `save` would name the hidden directory in its error
            if self.target.exists() and not self.target.is_dir():
                raise SaveFailed(
                    f"'{self.target}' exists and is not a directory; choose another path for the checkpoint"
                )
            if any(is_complete(manifest.parent) for manifest in self.target.glob(f"*/{MANIFEST}")):
                raise SaveFailed(f"'{self.target}' holds checkpoints itself; save to a directory in it")
            self.target.parent.mkdir(parents=True, exist_ok=True)
            for stale in self.target.parent.glob(f".{glob.escape(shorten_name(self.target.name))}.dsq-*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)

    def _rename_to_target(self) -> None:
        if self._comm.rank != 0:
            return
        if others := {path.name for path in self._files_parent.iterdir()} - {self.files_directory.name}:
            raise SaveFailed(
                f"{quote(sorted(others))} was written beside the files of '{self.target}', in a hidden directory that "
                f"is removed after the save; write to the directory of the checkpoint, or to '{self.target.parent}'"
            )
        for file in self.files_directory.iterdir():
            file.rename(self._hidden_directory / file.name)
        shutil.rmtree(self._files_parent)
        manifest = Manifest.read(self._hidden_directory)
        own_names = {MANIFEST, *(file.name for file in manifest.files)}
        files = (file for file in walk_files(self._hidden_directory) if file.is_file())
        paths = (file.relative_to(self._hidden_directory).as_posix() for file in files)
        manifest = manifest.model_copy(update={"beside": [name for name in paths if name not in own_names]})
        manifest.write(self._hidden_directory, exclusive=False, fsync=False)
        if self.target.is_dir():
            for _ in copy_other_files(self.target, self._hidden_directory, self._find_replaced_files()):
                pass
        if self._config.storage.fsync:
            flush_other_files(self._hidden_directory, own_names - {MANIFEST})
        replace_directory(self._hidden_directory, self.target)

    def _find_replaced_files(self) -> set[str]:
        """Return the files that the library wrote into the replaced checkpoint, which are not kept."""
        names = set[str]()
        with suppress(DSQError):  # a plain checkpoint, or one that cannot be read
            names |= set(Manifest.read(self.target).beside)
        paths = (file.relative_to(self.target) for file in walk_files(self.target))
        return names | {path.as_posix() for path in paths if LIBRARY_NAMES.fullmatch(path.parts[0])}


def finalize_save(
    result: SaveResult, target: Path, config: DSQConfig, rank: int = 0, on_save: OnSave | None = None
) -> None:
    """Complete a save under a hidden name after its directory was renamed; call it on every rank.

    Record the new directory for the next save, drop refinements of older checkpoints as configured, and log the
    checkpoint.

    Args:
        result: result of the save.
        target: directory of the checkpoint after the rename.
        config: configuration of the save.
        rank: rank of this process.
        on_save: function that is called with the result on rank 0.
    """
    default_history().move(result.save_id, target)
    if rank == 0:
        retire(target, config)
        announce(target, lambda: replace(result, path=target), on_save)


def is_compressed_on_all_ranks(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory is a compressed checkpoint, in contrast to one of the library; collective.

    Raises:
        CheckpointNotFound: the directory has files of a compressed checkpoint, but no manifest, or only some ranks see
            the checkpoint.
        ConfigError: `directory` is a URL.
    """
    flags = gather_from_all_ranks(communicator(None), lambda: is_compressed(resolve_local_path(directory)), LoadFailed)
    if len(set(flags)) > 1:
        raise CheckpointNotFound(
            f"'{directory}' is a compressed checkpoint on rank {flags.index(True)}, and is none on rank "
            f"{flags.index(False)}: all ranks need the same storage"
        )
    return flags[0]


def is_compressed(directory: Path) -> bool:
    """Return whether a directory is a compressed checkpoint, as this rank sees it.

    Raises:
        CheckpointNotFound: the directory has files of a compressed checkpoint, but no manifest.
    """
    if is_complete(directory):
        return True
    if any(directory.glob("*.dsq")):
        raise CheckpointNotFound(
            f"'{directory}' has files of a compressed checkpoint, but no manifest.json: it was deleted, or not copied; "
            "resume from another checkpoint"
        )
    return False
