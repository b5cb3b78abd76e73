"""A checkpoint directory of another library, which appears complete or not at all.

Libraries write a checkpoint as many files, one after the other, under the name that a restart looks for. Here all of
them are written below a hidden name beside it, which the restart does not see and `dsq gc` removes after a crash.
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
    """A checkpoint directory in the making; as a context manager it removes what was not published.

    All methods are collective over the default process group, and fail on all ranks if they fail on one.

    Args:
        goal: the directory that is to appear, on storage that all ranks share. A checkpoint that is there is replaced;
            files that are no part of one are kept.
        config: configuration of the save.
        on_save: called with the `SaveResult` on rank 0, once the directory has its name.
        asynchronous: `save` returns when training may go on; `publish_later` follows it.

    Raises:
        ConfigError: the goal is a URL.

    Attributes:
        goal: the directory that is to appear.
        files: the directory for files of the library: the hidden one of the compressed checkpoint; or one of the goal's
            name in another hidden one, where a thread makes the former meanwhile.
    """

    def __init__(
        self, goal: str | os.PathLike[str], config: DSQConfig, on_save: OnSave | None = None, asynchronous: bool = False
    ) -> None:
        self.goal, self._config, self._on_save = resolve_local_path(goal), config, on_save
        if self.goal.is_symlink():
            self.goal = self.goal.resolve()
        self._comm = communicator(None)
        mark = gather_from_all_ranks(self._comm, lambda: uuid.uuid4().hex)[0]
        self._path = hidden_name(self.goal, mark[:8])
        self._apart = hidden_name(self.goal, mark[8:16]) if asynchronous else None
        self.files = self._path if self._apart is None else self._apart / self.goal.name
        self._result: SaveResult | None = None
        self._saving: Future[SaveResult] | None = None
        self._published = False

    def __enter__(self) -> StagedCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._published or isinstance(error, RankUnreachable):  # others may still write
            return
        if self._saving is not None and self._saving.exception() is None:  # which waits: it still writes there
            self._result = self._saving.result()
        if self._result is not None:
            default_history().remove(self._result.save_id)
        if self._comm.rank == 0:
            for left in (self._path, *([self._apart] if self._apart is not None else [])):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self, collect: Callable[[], dict[str, Any]], *, model: nn.Module | None = None, pinned: bool = False
    ) -> None:
        """Save the state dict that `collect` returns, as a delta against the last checkpoint of the run.

        Raises:
            DSQError: the save failed.
        """
        def begin() -> dict[str, Any]:
            self._remove_earlier()
            return collect()

        state = run_on_all_ranks(self._comm, begin)
        options: dict[str, Any] = {"config": self._config, "model": model, "pinned": pinned}
        if self._apart is None:
            self._result = save(state, self._path, **options)
        else:
            self._saving = async_save(state, self._path, **options)

    def write(self, work: Callable[[Path], object]) -> None:
        """Call `work` with the hidden directory on every rank; it writes files of the library there.

        Raises:
            SaveFailed: it failed on a rank.
        """
        def write() -> None:
            with in_user_code():  # of the library, with objects of the user
                work(self.files)

        run_on_all_ranks(self._comm, write)

    def publish_later(self, then: Callable[[], object]) -> Future[None]:
        """Publish in a thread, once the save in the background is complete; the next save waits for it.

        Args:
            then: called in that thread on rank 0 after the directory has its name.

        Returns:
            A future, whose `result()` raises on all ranks what failed on one.
        """
        self._comm = communicator(background.get_group(None))  # training uses the default group meanwhile
        executor = ThreadPoolExecutor(1, "dsq_ckpt-publish")
        published = executor.submit(self._publish_saved, then)
        executor.shutdown(wait=False)
        background.set_pending(published)
        return published

    def _publish_saved(self, then: Callable[[], object]) -> None:
        assert self._saving is not None, "save comes first"
        with self:
            self._result = run_on_all_ranks(self._comm, self._saving.result)
            self.publish()
            run_on_all_ranks(self._comm, lambda: then() if self._comm.rank == 0 else None)

    def publish(self) -> None:
        """Give the directory its name, then drop the refinement of older checkpoints as the configuration asks.

        Raises:
            SaveFailed: it cannot be flushed or renamed.
        """
        assert self._result is not None, "save comes first"
        run_on_all_ranks(self._comm, self._rename)
        self._published = True
        settle(self._result, self.goal, self._config, self._comm.rank, self._on_save)
        if self._comm.rank == 0:
            with suppress(OSError):  # libraries that remove old checkpoints go by this time
                os.utime(self.goal)

    def _remove_earlier(self) -> None:
        """Remove what killed saves of the same checkpoint left.

        Raises:
            SaveFailed: what has the name is no directory, or a run directory with checkpoints, or lies in a checkpoint.
        """
        if self._comm.rank == 0:
            refuse_within_checkpoint(self.goal)  # by its name, and not by that of the hidden one
            if self.goal.exists() and not self.goal.is_dir():
                raise SaveFailed(f"'{self.goal}' exists and is not a directory; choose another path for the checkpoint")
            if any(is_complete(one.parent) for one in self.goal.glob(f"*/{MANIFEST}")):
                raise SaveFailed(f"'{self.goal}' holds checkpoints itself; save to a directory in it")
            self.goal.parent.mkdir(parents=True, exist_ok=True)
            for left in self.goal.parent.glob(f".{glob.escape(shorten_name(self.goal.name))}.dsq-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            if self._apart is not None:
                self.files.mkdir(parents=True)

    def _rename(self) -> None:
        if self._comm.rank != 0:
            return
        if self._apart is not None:
            for written in self.files.iterdir():
                written.rename(self._path / written.name)
            shutil.rmtree(self._apart)
        manifest = Manifest.read(self._path)
        ours = {MANIFEST, *(file.name for file in manifest.files)}
        there = (file.relative_to(self._path).as_posix() for file in walk_files(self._path) if file.is_file())
        manifest = manifest.model_copy(update={"beside": [name for name in there if name not in ours]})
        manifest.write(self._path, exclusive=False, fsync=False)
        if self.goal.is_dir():
            for _ in copy_other_files(self.goal, self._path, self._replaced()):
                pass
        if self._config.storage.fsync:
            flush_other_files(self._path, ours - {MANIFEST})
        replace_directory(self._path, self.goal)

    def _replaced(self) -> set[str]:
        """Return the paths of what the library has written into an earlier checkpoint, which must not stay."""
        earlier = set[str]()
        with suppress(DSQError):  # a plain checkpoint, or one that cannot be read
            earlier |= set(Manifest.read(self.goal).beside)
        paths = (file.relative_to(self.goal) for file in walk_files(self.goal))
        return earlier | {path.as_posix() for path in paths if LIBRARY_NAMES.fullmatch(path.parts[0])}


def settle(
    result: SaveResult, goal: Path, config: DSQConfig, rank: int = 0, on_save: OnSave | None = None
) -> None:
    """Do what a save leaves open that was made under a hidden name, once it has its own; on every rank.

    The next save finds its parent there; older checkpoints lose their refinement as the configuration asks; and the
    checkpoint is logged.

    Args:
        result: result of the save.
        goal: the present directory of the checkpoint.
        config: configuration of the save.
        rank: of this process.
        on_save: called with the result, on rank 0.
    """
    default_history().move(result.save_id, goal)
    if rank == 0:
        retire(goal, config)
        announce(goal, lambda: replace(result, path=goal), on_save)


def holds_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory is a compressed checkpoint; False if it is one that the library wrote itself.

    Collective: ranks that took it for different things would wait for each other.

    Raises:
        CheckpointNotFound: it has files of a compressed checkpoint, but no manifest, or is not there on all ranks.
        ConfigError: it is a URL.
    """
    found = gather_from_all_ranks(communicator(None), lambda: is_compressed(resolve_local_path(directory)), LoadFailed)
    if len(set(found)) > 1:
        raise CheckpointNotFound(
            f"'{directory}' is a compressed checkpoint on rank {found.index(True)}, and is none on rank "
            f"{found.index(False)}: all ranks need the same storage"
        )
    return found[0]


def is_compressed(directory: Path) -> bool:
    """Return what this rank sees of `holds_checkpoint`.

    Raises:
        CheckpointNotFound: it has files of a compressed checkpoint, but no manifest.
    """
    if is_complete(directory):
        return True
    if any(directory.glob("*.dsq")):
        raise CheckpointNotFound(
            f"'{directory}' has files of a compressed checkpoint, but no manifest.json: it was deleted, or not copied; "
            "resume from another checkpoint"
        )
    return False
