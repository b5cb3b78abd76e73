"""A wrapper of DeepSpeed's checkpoint engine that makes a tag directory a compressed checkpoint."""

from __future__ import annotations

import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_url
from dsq_ckpt.deepspeed.flat_buffers import (
    Inventory,
    count_uncompressed_bytes,
    get_optimizer_settings,
    get_parameter_name,
    get_uncompressed_reason,
    take_inventory,
)
from dsq_ckpt.deepspeed.gradients import FlatGradients
from dsq_ckpt.deepspeed.tags import agree_on_tag, copy_scripts, find_tag_directory, resolve_tag, write_latest
from dsq_ckpt.deepspeed.tensor_substitution import find_diverged_parameters, get_nesting, iter_shards, write_substituted
from dsq_ckpt.distributed.comm import TorchCommunicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.chain import describe_base_loss
from dsq_ckpt.engine.collective import save_collectively
from dsq_ckpt.engine.history import ChunkCache, default_history
from dsq_ckpt.engine.local_state import LocalState
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
    """A checkpoint engine that writes compressed tags, and reads compressed and plain tags.

    DeepSpeed calls `save` on some ranks only, and on one rank after the other, so `save` only queues files. `commit`
    does all collective work, on a process group of its own.

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
        self._tag: str | None = None  # `_tag` to `_scripts`: of the current save
        self._client_state: Mapping[Any, Any] = {}
        self._save_latest = False
        self._scripts: list[tuple[Callable[[str], None], str]] = []  # functions that copy scripts, and their arguments
        self._warned_state_keys = set[str]()  # keys of uncompressed state for which a warning was issued
        self._warned_uncompressed = False
        self._last_tag: Path | None = None  # directory of the tag that was saved or loaded last
        self._directory_error: OSError | None = None
        self._preloaded: tuple[Path, str, Any] | None = None  # file, save ID and content

    # DeepSpeed passes arguments by keyword, so their names are those of the base class.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; collective.

        Raises:
            ConfigError: on all ranks, if the directory is a URL.
            SaveFailed: on all ranks, if the directory cannot be created, or see `agree_on_tag`.
        """
        self._queue.clear()
        self._tag = None
        directory_error, self._directory_error = self._directory_error, None
        engine = self._engine
        deepspeed_refuses = engine.checkpoint_tag_validation_enabled() and engine.checkpoint_tag_validation_fail()
        self._tag = agree_on_tag(self._comm, info.save_dir, info.tag, deepspeed_refuses, directory_error)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create the directory for checkpoints. `create` reports errors, since other ranks wait at a barrier here.

        `commit` creates the directory of a tag, so that an earlier failure leaves no directory.
        """
        if self._tag is not None or is_url(path):
            return
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._directory_error = error

    def save(self, state_dict: Any, path: str) -> None:
        """Queue a file for `commit`; DeepSpeed does not change the tensors before."""
        self._queue[Path(path).absolute()] = state_dict

    @hold_signals()
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Write the queued files; collective.

        Raises:
            DSQError: on all ranks, if any rank failed; `latest` and earlier tags are untouched.
        """
        queue, self._queue = self._queue, {}
        tag, self._tag = self._tag, None
        tag_directory = Path(info.save_dir, info.tag).absolute()

        def copy_scripts_and_check_queue() -> bool:
            copy_scripts(self._scripts, self.config.storage.fsync)
            return any(path.is_relative_to(tag_directory) for path in queue)

        if any(gather_from_all_ranks(self._comm, copy_scripts_and_check_queue)):
            files = {str(path.relative_to(tag_directory)): state for path, state in queue.items()}
            self._commit_tag(Path(info.save_dir, tag or info.tag).absolute(), files)
        else:
            run_on_all_ranks(self._comm, lambda: _write_plain(queue))

        def finish() -> None:
            if self._save_latest and self._comm.rank == 0:  # rank 0 decides, as in DeepSpeed
                write_latest(info.save_dir, info.tag, self.config.storage.fsync)
            run_pending_handlers()

        run_on_all_ranks(self._comm, finish)
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
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None and preloaded[:2] == (file, manifest.save_id):
            return preloaded[2]
        # All functions that DeepSpeed passes leave storages on the CPU; torch accepts none for wrapper subclasses.
        device = "cpu" if callable(map_location) else map_location
        with pickle_refs.stored_in(file.parent):
            # weights_only=False as in DeepSpeed, whose files hold its own objects and the user's.
            loaded = torch.load(path, map_location=device, weights_only=False)
        if preloaded is None and callable(map_location):
            # DeepSpeed loads a module's first file twice, to inspect and to use it; decoding it twice would be slow.
            self._preloaded = file, manifest.save_id, loaded
        return loaded

    def resolve_tag(self, load_dir: str, latest: str, tag: str | None) -> str | None:
        """Return the tag to load; see `tags.resolve_tag`."""
        return resolve_tag(self._comm, load_dir, latest, tag)

    @contextmanager
    def save_context(self, client_state: Mapping[Any, Any], save_latest: bool) -> Iterator[None]:
        """Store `client_state` exactly in the save within this context.

        `commit` also copies DeepSpeed's scripts, and writes `latest` if `save_latest` is True.
        """
        outer = self._client_state, self._save_latest, self._scripts  # an outer save, if a signal handler saves
        copy, override = self._engine._copy_recovery_script, vars(self._engine).get("_copy_recovery_script")
        scripts: list[tuple[Callable[[str], None], str]] = []
        self._client_state, self._save_latest, self._scripts = client_state, save_latest, scripts
        self._engine._copy_recovery_script = lambda directory: scripts.append((copy, directory))
        try:
            yield
        finally:
            self._client_state, self._save_latest, self._scripts = outer
            del self._engine._copy_recovery_script  # restores the method of the class
            if override is not None:
                self._engine._copy_recovery_script = override

    @contextmanager
    def load_context(self, load_dir: str, tag: str) -> Iterator[None]:
        """Verify a tag, and keep the codes that are loaded in this context for the next save; collective.

        The ranks share the verification of all files by their checksums, since an error on one rank during loading
        would leave the others waiting. A plain tag is not verified.

        Raises:
            CorruptCheckpoint: on all ranks, if any file is missing or altered.
            CheckpointNotFound: on all ranks, if the tag does not exist, or its save did not complete.
            LoadFailed: on all ranks, if tags differ by rank; or if DeepSpeed cannot load the tag into this engine.
        """
        directory = find_tag_directory(self._comm, load_dir, tag)
        run_on_all_ranks(self._comm, lambda: restore_backups(directory) if self._comm.rank == 0 else None, LoadFailed)
        manifest: Manifest | None = None

        def verify_files() -> list[str]:
            nonlocal manifest
            problems, manifest = self._verify_files(directory)
            return problems

        gathered = gather_from_all_ranks(self._comm, verify_files, LoadFailed)
        problems = [problem for rank_problems in gathered for problem in rank_problems]
        if problems:  # the same error on all ranks
            self._history.mark_suspect()
            raise CorruptCheckpoint(f"{'; '.join(problems[:3])}; load another tag")
        if manifest is not None and manifest.refinement == "dropped":
            warn(describe_base_loss(directory, manifest), rank=self._comm.rank)
        # The engine may have no moments before the first step, so chunks are identified by parameter.
        shards = iter_shards(take_inventory(self._engine).buffers, self._comm.rank, self._comm.size)
        own = {(get_parameter_name(shard.key.fqn), *shard.key[1:]) for shard in shards}
        with pickle_refs.keep_codes(directory, lambda key: (get_parameter_name(key.fqn), *key[1:]) in own) as codes:
            try:
                yield
            except AssertionError as error:
                if str(error):
                    raise
                names = ", ".join(sorted(file.name for file in directory.glob("*.pt"))[:4]) or "none"
                assertion = traceback.extract_tb(error.__traceback__)[-1].line or "an assertion of its own"
                raise LoadFailed(
                    f"rank {self._comm.rank}: DeepSpeed cannot load '{directory}', which holds {names}, into this "
                    f"engine ({assertion}); was it saved with another ZeRO stage or another number of ranks? If not, "
                    "see whether it loads its own tags of this engine"
                ) from error
            finally:
                self._preloaded = None
                pickle_refs.close_last_checkpoint()
        if manifest is not None:
            if self._comm.rank == 0:
                logger.info("loaded %s, refinement %s, depth %d", directory.name, manifest.refinement, manifest.depth)
            self._history.add_loaded(directory, manifest.save_id, ChunkCache(codes=codes))
            self._last_tag = directory
            self._resume_policy(manifest)
        # A universal checkpoint or an export does not record which moments were once lossy.
        record_load(MOMENTS if manifest is None else manifest.lossy_kinds)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return the result of the former checkpoint engine."""
        return bool(self.inner.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """Return the result of the former checkpoint engine."""
        return bool(self.inner.preserves_storage_sharing())

    def cleanup(self) -> None:
        """Close the files that were read."""
        pickle_refs.close_last_checkpoint()
        self.inner.cleanup()

    def _commit_tag(self, directory: Path, files: Mapping[str, Any]) -> None:
        inventory = Inventory()
        parent = "auto"

        def survey_buffers() -> tuple[set[str], Counter[str], bool]:
            nonlocal inventory, parent
            inventory, parent = take_inventory(self._engine), self._choose_parent(directory)
            byte_counts = count_uncompressed_bytes(self._engine, inventory, self.config.quantize.min_elements)
            has_slices = any(buffer.slices for buffer in inventory.buffers)
            return find_diverged_parameters(inventory), byte_counts, has_slices

        surveys = gather_from_all_ranks(self._comm, survey_buffers)
        diverged_parameters = set().union(*(parameters for parameters, _, _ in surveys))
        self._warn_uncompressed_state(sum((byte_counts for _, byte_counts, _ in surveys), Counter()))
        if not any(has_slices for _, _, has_slices in surveys):
            self._warn_nothing_compressed()
        write = partial(
            write_substituted, inventory=inventory, diverged_parameters=diverged_parameters,
            client_state=self._client_state,
        )

        def create_local_state() -> LocalState:
            writes_partitions = bool(getattr(self._engine, "save_zero_checkpoint", True))
            buffers = [buffer for buffer in inventory.buffers if buffer.replicated or writes_partitions]
            return LocalState(
                shards=list(iter_shards(buffers, self._comm.rank, self._comm.size)),
                replicas=list(iter_shards(buffers, self._comm.rank, self._comm.size, replicas=True)),
                nesting=get_nesting(buffers),
                attachments={name: partial(write, state=state) for name, state in files.items()},
                gradients={} if self._gradients is None else self._gradients.split_by_chunk(buffers),
                settings=get_optimizer_settings(self._engine),
            )

        options = SaveOptions(
            self.config, parent, overwrite=True, layer_types=layer_types(self._engine.module), policy=self._policy,
            fractions=Fractions() if self._gradients is None else self._gradients.fractions, history=self._history,
            on_save=self._on_save, rounding=find_rounded_weights(self._engine.module),
        )
        try:
            plan = save_collectively(directory, create_local_state, options, self._comm)
        finally:
            if self._gradients is not None:
                self._gradients.reset()
        if parent != "auto":
            self._history.clear(self._last_tag)  # else codes of every directory of the run would stay in memory
        self.quality, self._last_tag = plan.quality, directory

    def _warn_uncompressed_state(self, byte_counts: Counter[str]) -> None:
        """Warn once about each key of the optimizer's state that is stored uncompressed in DeepSpeed's own files."""
        if new_keys := sorted(byte_counts.keys() - self._warned_state_keys):
            self._warned_state_keys.update(new_keys)
            warn(
                f"{sum(byte_counts[key] for key in new_keys) / 2**20:.3g} MiB of the optimizer's {quote(new_keys)} is "
                "stored whole, in DeepSpeed's own files: it is not laid out as the weights are, so which parameters it "
                "belongs to is not known, or it is quantized already", rank=self._comm.rank,
            )

    def _warn_nothing_compressed(self) -> None:
        """Warn once that tags consist of DeepSpeed's own files only, since no rank can name the tensors."""
        if not self._warned_uncompressed:
            self._warned_uncompressed = True
            unknown = "the state of this optimizer is not laid out as the weights are"
            reason = get_uncompressed_reason(self._engine) or unknown
            warn(
                f"nothing of this engine's tags is compressed, though its configuration has the block dsq_checkpoint: "
                f"{reason}. They are DeepSpeed's own files, with the checksums and the atomic commit of dsq_ckpt; "
                '"enabled": false in the block leaves these out', rank=self._comm.rank,
            )

    def _choose_parent(self, directory: Path) -> str:
        """Return the parent of a tag; Hugging Face's Trainer saves each tag to another run directory."""
        if self._last_tag is None or get_run(self._last_tag) == get_run(directory):
            return "auto"
        try:
            return str(self._last_tag) if is_complete(self._last_tag) else "auto"
        except LoadFailed as error:
            raise SaveFailed(f"rank {self._comm.rank}: {error}") from error

    def _verify_files(self, directory: Path) -> tuple[list[str], Manifest | None]:
        """Verify this rank's share of a tag's files; return problems, and the manifest of a compressed tag."""
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

    def _resume_policy(self, manifest: Manifest) -> None:
        resume = getattr(self._policy, "resume", None)
        if resume is not None:
            resume(manifest, refined=True)


def _write_plain(queue: Mapping[Path, Any]) -> None:
    """Write files outside of a tag, such as those of `save_16bit_model`, uncompressed and atomically."""
    for path, state in queue.items():
        with create_file(path) as stream:
            torch.save(state, stream)
