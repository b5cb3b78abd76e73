"""A wrapper of DeepSpeed's checkpoint engine that makes a tag directory a compressed checkpoint."""

from __future__ import annotations

import io
import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_url
from dsq_ckpt.deepspeed.gradients import FlatGradients
from dsq_ckpt.deepspeed.partition import Inventory, inventory, left_whole, parameter_in, settings, why_uncompressed
from dsq_ckpt.deepspeed.state import Substitution, differing, nesting_of, shards_of
from dsq_ckpt.deepspeed.tags import agreed_tag, copy_scripts, find_tag, tag_to_load, write_latest
from dsq_ckpt.distributed.comm import TorchCommunicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.chain import describe_base_loss
from dsq_ckpt.engine.collective import save_collectively
from dsq_ckpt.engine.history import ChunkCache, default_history
from dsq_ckpt.engine.local_state import Attachment, LocalState
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, LoadFailed, SaveFailed
from dsq_ckpt.quantization.groups import is_lossy, layer_types
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import ConfigPolicy, plan_as_configured
from dsq_ckpt.quantization.restored_values import MOMENTS, record_load
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
from dsq_ckpt.storage import pickle_refs
from dsq_ckpt.storage.atomic_io import create_file
from dsq_ckpt.storage.attachment_files import find_plain_backups, restore_backups
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest, is_complete
from dsq_ckpt.storage.runs import get_run

logger = logging.getLogger(__name__)


class DSQCheckpointEngine(CheckpointEngine):
    """A checkpoint engine that writes compressed tags, and reads compressed tags and DeepSpeed's own.

    DeepSpeed calls `save` on some ranks only and in turns, so `save` only queues files. All collective work is done in
    `commit`, on a separate process group, before DeepSpeed updates `latest`.

    Args:
        engine: DeepSpeed engine.
        inner: former checkpoint engine of `engine`.
        config: configuration of lossy compression.
        group: gloo process group over all ranks.
        policy: policy that chooses the configuration of each save.
        gradients: averaged gradients for sensitivity, if the configuration uses them.
        on_save: called with the `SaveResult` of each tag, on rank 0.
    """

    def __init__(
        self, engine: Any, inner: Any, config: DSQConfig, group: dist.ProcessGroup,
        policy: ConfigPolicy = plan_as_configured,
        gradients: FlatGradients | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        super().__init__()
        self.name = "dsq_ckpt"
        self.config = config
        if is_lossy(config):
            warmup.start()
        self.inner = inner
        self.quality: dict[str, Any] | None = None
        """Measurements of the search for the last configuration."""
        self._engine = engine
        self.group = group
        self._comm = TorchCommunicator(group)
        self._policy = policy
        self._history = default_history()
        self._gradients = gradients
        self._on_save = on_save
        self._queue: dict[Path, Any] = {}
        self._tag: str | None = None  # of the save that is under way
        self._whole = set[str]()  # keys of state that is not compressed, of which was warned
        self._told_uncompressed = False
        self._client: Mapping[Any, Any] = {}  # its client_state
        self._save_latest = False
        self._scripts: list[tuple[Callable[[str], None], str]] = []  # function that copies scripts, and where to
        self._last: Path | None = None
        self._unusable: OSError | None = None
        self._looked_at: tuple[Path, str, Any] | None = None

    # Names of arguments are those of the base class: DeepSpeed passes them by keyword.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; collective.

        Raises:
            ConfigError: on all ranks, if the directory is a URL.
            SaveFailed: on all ranks, if it cannot be created, or see `agreed_tag`.
        """
        self._queue.clear()
        self._tag = None
        unusable, self._unusable = self._unusable, None
        validated = self._engine.checkpoint_tag_validation_enabled() and self._engine.checkpoint_tag_validation_fail()
        self._tag = agreed_tag(self._comm, info.save_dir, info.tag, validated, unusable)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a directory. Other ranks wait for this rank at a barrier, so `create` reports a failure, or a URL.

        The directory of a tag is created in `commit`, so that an earlier failure leaves no directory.
        """
        if self._tag is not None or is_url(path):
            return
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._unusable = error

    def save(self, state_dict: Any, path: str) -> None:
        """Queue a file for `commit`; DeepSpeed does not change its tensors until then."""
        self._queue[Path(path).absolute()] = state_dict

    @hold_signals()
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Write the queued files; collective.

        Raises:
            DSQError: on all ranks, when any failed; `latest` and earlier tags are untouched.
        """
        queue, self._queue = self._queue, {}
        tag, self._tag = self._tag, None
        own = Path(info.save_dir, info.tag).absolute()

        def begin() -> bool:
            copy_scripts(self._scripts, self.config.storage.fsync)
            return any(path.is_relative_to(own) for path in queue)

        if any(gather_from_all_ranks(self._comm, begin)):
            files = {str(path.relative_to(own)): state for path, state in queue.items()}
            self._commit_tag(Path(info.save_dir, tag or info.tag).absolute(), files)
        else:
            run_on_all_ranks(self._comm, lambda: _write_plain(queue))

        def end() -> None:
            if self._save_latest and self._comm.rank == 0:  # rank 0 decides, as in DeepSpeed
                write_latest(info.save_dir, info.tag, self.config.storage.fsync)
            run_pending_handlers()

        run_on_all_ranks(self._comm, end)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of a compressed or plain tag.

        Raises:
            DSQError: the checkpoint of the file is incomplete or damaged.
        """
        file = Path(path).absolute()
        if not is_complete(file.parent):
            return self.inner.load(path, map_location=map_location)
        manifest = Manifest.read(file.parent)
        looked_at, self._looked_at = self._looked_at, None
        if looked_at is not None and looked_at[:2] == (file, manifest.save_id):
            return looked_at[2]
        # DeepSpeed's functions all leave storages on the CPU; torch takes none for tensors that consist of others.
        device = "cpu" if callable(map_location) else map_location
        with pickle_refs.stored_in(file.parent):
            # weights_only=False as in DeepSpeed, whose files hold objects of its own and of the user.
            loaded = torch.load(path, map_location=device, weights_only=False)
        if looked_at is None and callable(map_location):
            # DeepSpeed loads a module's first file twice, to inspect and to use it; decoding twice would be slow.
            self._looked_at = file, manifest.save_id, loaded
        return loaded

    def tag_to_load(self, load_dir: str, latest: str, tag: str | None) -> str | None:
        """See `tags.tag_to_load`."""
        return tag_to_load(self._comm, load_dir, latest, tag)

    @contextmanager
    def saving(self, client_state: Mapping[Any, Any], save_latest: bool) -> Iterator[None]:
        """Return a context for saving a tag whose `client_state` is stored exactly.

        In it, `commit` copies DeepSpeed's scripts and writes `latest`, if `save_latest` says so.
        """
        outer = self._client, self._save_latest, self._scripts  # of a save that a signal's handler interrupts
        copy, own = self._engine._copy_recovery_script, vars(self._engine).get("_copy_recovery_script")
        scripts: list[tuple[Callable[[str], None], str]] = []
        self._client, self._save_latest, self._scripts = client_state, save_latest, scripts
        self._engine._copy_recovery_script = lambda directory: scripts.append((copy, directory))
        try:
            yield
        finally:
            self._client, self._save_latest, self._scripts = outer
            del self._engine._copy_recovery_script  # of the instance; its class has it again
            if own is not None:
                self._engine._copy_recovery_script = own

    @contextmanager
    def loading(self, load_dir: str, tag: str) -> Iterator[None]:
        """Return a context for loading a tag; collective. The tag's codes serve the next save.

        All files are verified by their checksums first, each rank a share of them: an error on one rank during loading
        would leave the others waiting. A plain tag is not verified.

        Raises:
            CorruptCheckpoint: on all ranks, if any file is missing or altered.
            CheckpointNotFound: on all ranks, if the tag does not exist, or its save did not complete.
            LoadFailed: on all ranks, if their tags differ, or DeepSpeed cannot load them into this engine.
        """
        directory = find_tag(self._comm, load_dir, tag)
        run_on_all_ranks(self._comm, lambda: restore_backups(directory) if self._comm.rank == 0 else None, LoadFailed)
        manifest: Manifest | None = None

        def checked() -> list[str]:
            nonlocal manifest
            problems, manifest = self._checked(directory)
            return problems

        found = [problem for several in gather_from_all_ranks(self._comm, checked, LoadFailed) for problem in several]
        if found:  # the same error on all ranks, so that all of them handle it alike
            self._history.mark_suspect()
            raise CorruptCheckpoint(f"{'; '.join(found[:3])}; load another tag")
        if manifest is not None and manifest.refinement == "dropped":
            warn(describe_base_loss(directory, manifest), rank=self._comm.rank)
        buffers = inventory(self._engine).buffers  # without moments before the first step
        own = {
            (parameter_in(part.key.fqn), *part.key[1:]) for part in shards_of(buffers, self._comm.rank, self._comm.size)
        }
        with pickle_refs.keep_codes(directory, lambda key: (parameter_in(key.fqn), *key[1:]) in own) as codes:
            try:
                yield
            except AssertionError as error:
                if str(error):
                    raise
                held = ", ".join(sorted(file.name for file in directory.glob("*.pt"))[:4]) or "none"
                failed = traceback.extract_tb(error.__traceback__)[-1].line or "an assertion of its own"
                raise LoadFailed(
                    f"rank {self._comm.rank}: DeepSpeed cannot load '{directory}', which holds {held}, into this "
                    f"engine ({failed}); was it saved with another ZeRO stage or another number of ranks? If not, see "
                    "whether it loads its own tags of this engine"
                ) from error
            finally:
                self._looked_at = None
                pickle_refs.close_last_checkpoint()
        if manifest is not None:
            if self._comm.rank == 0:
                logger.info("loaded %s, refinement %s, depth %d", directory.name, manifest.refinement, manifest.depth)
            self._history.add_loaded(directory, manifest.save_id, ChunkCache(codes=codes))
            self._last = directory
            self._resume(manifest)
        # Of a universal checkpoint, or an export, nothing tells which of its moments were lossy once.
        record_load(MOMENTS if manifest is None else manifest.lossy_kinds)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return the former checkpoint engine's answer."""
        return bool(self.inner.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """Return the former checkpoint engine's answer."""
        return bool(self.inner.preserves_storage_sharing())

    def cleanup(self) -> None:
        """Close the files that were read."""
        pickle_refs.close_last_checkpoint()
        self.inner.cleanup()

    def _commit_tag(self, directory: Path, files: Mapping[str, Any]) -> None:
        found = Inventory()
        parent = "auto"

        def surveyed() -> tuple[set[str], Counter[str], bool]:
            nonlocal found, parent
            found, parent = inventory(self._engine), self._parent_of(directory)
            left = left_whole(self._engine, found, self.config.quantize.min_elements)
            return differing(found), left, any(buffer.slices for buffer in found.buffers)

        ranks = gather_from_all_ranks(self._comm, surveyed)
        unlike = set().union(*(one for one, _, _ in ranks))
        self._tell_of_whole(sum((left for _, left, _ in ranks), Counter()))
        if not any(has_slices for _, _, has_slices in ranks):
            self._tell_of_uncompressed()

        def state() -> LocalState:
            writes = bool(getattr(self._engine, "save_zero_checkpoint", True))
            buffers = [buffer for buffer in found.buffers if buffer.replicated or writes]
            return LocalState(
                shards=list(shards_of(buffers, self._comm.rank, self._comm.size)),
                replicas=list(shards_of(buffers, self._comm.rank, self._comm.size, written=False)),
                nesting=nesting_of(buffers),
                attachments={name: self._writer(found, unlike, state) for name, state in files.items()},
                gradients={} if self._gradients is None else self._gradients.by_chunk(buffers),
                settings=settings(self._engine),
            )

        options = SaveOptions(
            self.config, parent, overwrite=True, layer_types=layer_types(self._engine.module), policy=self._policy,
            fractions=Fractions() if self._gradients is None else self._gradients.fractions, history=self._history,
            on_save=self._on_save, rounding=find_rounded_weights(self._engine.module),
        )
        try:
            plan = save_collectively(directory, state, options, self._comm)
        finally:
            if self._gradients is not None:
                self._gradients.reset()
        if parent != "auto":
            self._history.clear(self._last)  # codes of every directory that a run uses would stay in memory
        self.quality, self._last = plan.quality, directory

    def _tell_of_whole(self, left: Counter[str]) -> None:
        """Warn, once, of state that is in DeepSpeed's own files, uncompressed."""
        if new := sorted(left.keys() - self._whole):
            self._whole.update(new)
            warn(
                f"{sum(left[key] for key in new) / 2**20:.3g} MiB of the optimizer's {quote(new)} is stored whole, in "
                "DeepSpeed's own files: it is not laid out as the weights are, so which parameters it belongs to is "
                "not known, or it is quantized already", rank=self._comm.rank,
            )

    def _tell_of_uncompressed(self) -> None:
        """Warn, once, that tags are DeepSpeed's own files and nothing else, of whose tensors no rank knows a name."""
        if not self._told_uncompressed:
            self._told_uncompressed = True
            why = why_uncompressed(self._engine) or "the state of this optimizer is not laid out as the weights are"
            warn(
                f"nothing of this engine's tags is compressed, though its configuration has the block dsq_checkpoint: "
                f"{why}. They are DeepSpeed's own files, with the checksums and the atomic commit of dsq_ckpt; "
                '"enabled": false in the block leaves these out', rank=self._comm.rank,
            )

    def _parent_of(self, directory: Path) -> str:
        """Return the parent of a tag, which may be in another run directory, as with Hugging Face's trainer."""
        if self._last is None or get_run(self._last) == get_run(directory):
            return "auto"
        try:
            return str(self._last) if is_complete(self._last) else "auto"
        except LoadFailed as error:
            raise SaveFailed(f"rank {self._comm.rank}: {error}") from error

    def _writer(self, found: Inventory, unlike: set[str], state: Any) -> Attachment:
        return partial(_write_stored, found=found, unlike=unlike, state=state, client=self._client)

    def _checked(self, directory: Path) -> tuple[list[str], Manifest | None]:
        """Verify this rank's share of a tag's files; return the problems, and the manifest of a compressed tag."""
        if not is_complete(directory):
            if any(directory.glob("*.dsq")) and not find_plain_backups(directory):
                raise CheckpointNotFound(
                    f"'{directory}' holds no manifest.json: its save did not complete, or that file was deleted; load "
                    "another tag"
                )
            return [], None
        with Checkpoint(directory) as checkpoint:
            names = [file.name for file in checkpoint.manifest.files][self._comm.rank :: self._comm.size]
            problems = [f"'{directory / name}' {problem}" for name, _, problem in checkpoint.verify(names) if problem]
        return problems, checkpoint.manifest

    def _resume(self, manifest: Manifest) -> None:
        resume = getattr(self._policy, "resume", None)
        if resume is not None:
            resume(manifest, refined=True)


def _write_stored(
    stream: IO[bytes], save_id: str, *, found: Inventory, unlike: set[str], state: Any, client: Mapping[Any, Any]
) -> None:
    substitution = Substitution(save_id, found, unlike)
    try:
        torch.save(substitution.of_file(state, client), stream)
    except OSError:  # of the stream
        raise
    except Exception as error:  # `__reduce__` of an object may raise any
        wrong = [key for key, value in state.items() if not _pickles(substitution, value)]
        if not wrong:
            raise
        cause = "it contains itself, or is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SaveFailed(f"{quote(wrong)} of the state, or of client_state, cannot be pickled: {cause}") from error


def _pickles(substitution: Substitution, value: Any) -> bool:
    try:
        torch.save(substitution(value), io.BytesIO())
        return True
    except Exception:
        return False


def _write_plain(queue: Mapping[Path, Any]) -> None:
    """Write files outside of a tag, such as those of `save_16bit_model`, uncompressed and atomically."""
    for path, state in queue.items():
        with create_file(path) as stream:
            torch.save(state, stream)

