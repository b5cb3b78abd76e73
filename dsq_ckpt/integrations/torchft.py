"""Recovery of replicas in torchft, with losslessly compressed states.

    manager = Manager(..., checkpoint_transport=DSQTransport())

A replica that is behind fetches the state of an up-to-date replica over HTTP, as with torchft's `HTTPTransport`. The
state is sent as a checkpoint of this package in a tar archive: a keyframe with the preset "exact", and its manifest
last. So every byte is verified before it is used, and only plain data is unpickled.
"""

from __future__ import annotations

import errno
import http.client
import logging
import os
import re
import secrets
import socket
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path
from torchft.checkpointing import CheckpointTransport

from dsq_ckpt.api.loading import load
from dsq_ckpt.api.saving import save
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, DSQError, LoadFailed, SaveFailed, described
from dsq_ckpt.storage.manifest import MANIFEST
from dsq_ckpt.storage.manifest_names import is_plain_name

__all__ = ["DSQTransport"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_REFUSAL_BYTES = 4096
"""Maximum size of the body of a refusal."""
_BLOCK_BYTES = 1 << 20
_SECRET_PATH = re.compile(r"/[0-9a-f]+/")
_NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class DSQTransport(CheckpointTransport[T]):
    """A `CheckpointTransport` of losslessly compressed states, for `Manager(checkpoint_transport=DSQTransport())`.

    A state consists of nested dicts and lists of tensors and plain data. Tensors are received on the CPU, bit for bit.
    A sharded tensor (`DTensor`) gets the sharding of the receiver, whose rank must be the rank of the sender in its
    replica.

    Args:
        timeout: time that a request waits for a state, and that `disallow_checkpoint` waits for active requests.
        state_dict: function that returns the state of this process in the layout of the manager's state dict; needed
            for sharded tensors only.
        directory: directory for the compressed state until it is sent or loaded; None for the system's directory of
            temporary files.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), *, state_dict: Callable[[], T] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        expect("timeout", timeout, timedelta, "a datetime.timedelta")
        expect("state_dict", state_dict, Callable | None, "a function that returns the state of this process")
        expect("directory", directory, str | os.PathLike | None, "a directory, as a str or a Path")
        if timeout <= timedelta(0):
            raise ConfigError(f"timeout is {timeout}, expected more than 0")
        if directory is not None and not os.path.isdir(directory):
            raise ConfigError(f"directory is '{os.fspath(directory)}', which is no directory: create it first")
        self.timeout, self._state_dict, self._directory = timeout, state_dict, directory
        self._config = DSQConfig.preset("exact").with_values(**{"storage.fsync": False})
        self._state_changed = threading.Condition()
        self._sent_state: tuple[int, tempfile.TemporaryDirectory[str]] | None = None
        self._active_reads: list[object] = []  # the state that each active request reads
        self._closed = False
        self.secret = secrets.token_hex(16)  # ports are reused, also by other jobs
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return the address of this process, for `recv_checkpoint` of other replicas."""
        return f"http://{socket.gethostname()}:{self._server.server_port}/{self.secret}/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Compress a state, and serve it to other replicas; the state may be changed after the return.

        Raises:
            ConfigError: the state has sharded tensors, and this transport has no `state_dict`.
            SaveFailed: the state cannot be stored (the message names the tensor), or `shutdown` was called.
        """
        self.disallow_checkpoint()
        directory = self._create_temporary_directory()
        try:
            sharded_paths: list[str] = []

            def to_local_tensor(path: Any, value: Any) -> Any:
                if not isinstance(value, DTensor):
                    return value
                if self._state_dict is None:
                    raise ConfigError(
                        f"state{keystr(path)} is a DTensor, whose mesh is not sent: give DSQTransport(state_dict=...), "
                        "so that a receiver knows the sharding of its own"
                    )
                sharded_paths.append(keystr(path))
                return value.to_local()

            state = tree_map_with_path(to_local_tensor, state_dict)
            save(
                {"state": state, "sharded": sharded_paths}, Path(directory.name, "state"), config=self._config,
                parent=None, no_dist=True, history=SaveHistory(),
            )
        except BaseException:
            directory.cleanup()
            raise
        with self._state_changed:
            if not self._closed:
                self._sent_state = step, directory
                self._state_changed.notify_all()
                return
        directory.cleanup()
        raise SaveFailed(f"the state of step {step} is not sent, as the DSQTransport was shut down")

    def disallow_checkpoint(self) -> None:
        """Stop serving the state, and wait for active requests, at most for the timeout."""
        with self._state_changed:
            served, self._sent_state = self._sent_state, None
            if served is None:  # do not wait again for requests that outlasted the timeout
                return
            self._state_changed.wait_for(lambda: served not in self._active_reads, self.timeout.total_seconds())
        served[1].cleanup()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of another replica.

        Args:
            src_rank: unused.
            metadata: result of `metadata` of the sender.
            step: expected step of the state.
            timeout: time to wait for the state, and for each part of it.

        Returns:
            The state, on the CPU.

        Raises:
            LoadFailed: the state was not received completely in time, belongs to another step, or has a class that is
                no plain data.
            CorruptCheckpoint: bytes were altered.
        """
        with _explain_errors(metadata, step, timeout), self._create_temporary_directory() as directory:
            _download_files(_parse_address(metadata), step, Path(directory), timeout)
            content: dict[str, Any] = {}
            load(content, directory, no_dist=True, history=SaveHistory())
            if content.keys() != {"state", "sharded"} or not isinstance(content["sharded"], list):
                raise LoadFailed("it sends a checkpoint that is none of a DSQTransport of this version")
            state: T = content["state"]
            if content["sharded"]:
                paths = {str(path) for path in content["sharded"]}
                state = _restore_sharding(state, paths, None if self._state_dict is None else self._state_dict())
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server and remove the state; if `wait`, return when this is done."""
        with self._state_changed:
            self._closed = True
            self._state_changed.notify_all()
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        if wait:
            closing.join()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.disallow_checkpoint()

    def _create_temporary_directory(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(
            prefix="dsq_ckpt-torchft-", dir=self._directory, ignore_cleanup_errors=True  # a request may still read it
        )

    @contextmanager
    def serve_state(self, step: int) -> Iterator[Path]:
        """Wait for the state of a step and yield its directory, which is kept within this context.

        Raises:
            LookupError: a later step is served, or no state was sent in time.
        """
        def is_ready() -> bool:  # the sender may still be in an earlier step
            return self._closed or (self._sent_state is not None and self._sent_state[0] >= step)

        with self._state_changed:
            self._state_changed.wait_for(is_ready, self.timeout.total_seconds())
            served = self._sent_state
            if served is None:
                raise LookupError("no state was sent in time")
            if served[0] != step:
                raise LookupError(f"the state of step {served[0]} is served, not of step {step}")
            self._active_reads.append(served)
        try:
            yield Path(served[1].name, "state")
        finally:
            with self._state_changed:
                self._active_reads.remove(served)
                self._state_changed.notify_all()


class _Server(ThreadingHTTPServer):
    """An HTTP server for the state of a transport, on all addresses of the host."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, transport: DSQTransport[Any]) -> None:
        self.transport = transport
        super().__init__(("", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection error, such as a reset; the default writes a traceback to stderr."""
        logger.info("a connection of %s ended", client_address, exc_info=True)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        self.timeout = self.server.transport.timeout.total_seconds()  # type: ignore[misc]  # of the socket
        super().setup()

    def do_GET(self) -> None:
        """Send the archive of a state."""
        transport = self.server.transport
        prefix, _, step = self.path.rpartition("/")
        try:
            if not (secrets.compare_digest(prefix.encode(), f"/{transport.secret}".encode()) and step.isdecimal()):
                raise LookupError("this is no address of a DSQTransport, or of one that has ended")
            with transport.serve_state(int(step)) as directory:
                self.send_response(200)
                self.send_header("Content-Type", "application/x-tar")
                self.end_headers()
                with tarfile.open(fileobj=self.wfile, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                    for name in sorted(os.listdir(directory), key=lambda name: (name == MANIFEST, name)):
                        with open(directory / name, "rb") as file:
                            member = tarfile.TarInfo(name)
                            member.size = os.fstat(file.fileno()).st_size
                            archive.addfile(member, file)
        except LookupError as error:
            with suppress(OSError):  # the receiver may have disconnected while it waited
                self._send_refusal(str(error))
        except OSError as error:  # the receiver has disconnected, or is too slow
            logger.warning("the state of step %s was not sent: %s", step, described(error))
            self.close_connection = True

    def _send_refusal(self, reason: str) -> None:
        body = reason.encode()
        self.send_response(HTTPStatus.CONFLICT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.info(format, *arguments)


def _download_files(address: SplitResult, step: int, directory: Path, timeout: timedelta) -> None:
    """Download the files of another replica's state to a directory.

    Raises:
        LoadFailed: the sender refuses the request, or sends no archive of files.
        OSError, HTTPException, TarError: the sender cannot be reached, or the archive ends too early.
    """
    seconds = max(timeout.total_seconds(), 1e-3)  # 0 would make the socket non-blocking
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)
    try:
        connection.request("GET", f"{address.path}{step}")
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise LoadFailed(f"it answers {response.read(_MAX_REFUSAL_BYTES).decode(errors='replace')!r}")
        # tarfile.open would accept sparse files, of which few bytes become large files, and headers of any length.
        while (header := b"".join(_read_blocks(response, tarfile.BLOCKSIZE))) != bytes(tarfile.BLOCKSIZE):
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            if member.type != tarfile.REGTYPE or member.size < 0 or not is_plain_name(member.name):
                raise LoadFailed(f"it sends {member.name!r}, which is no file of a checkpoint")
            with open(directory / member.name, "xb") as file:
                file.writelines(_read_blocks(response, member.size))
            for _ in _read_blocks(response, -member.size % tarfile.BLOCKSIZE):  # padding
                pass
    finally:
        connection.close()


def _read_blocks(response: http.client.HTTPResponse, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a response in blocks.

    Raises:
        IncompleteRead: the response ends before.
    """
    while size > 0:
        block = response.read(min(size, _BLOCK_BYTES))
        if not block:
            raise http.client.IncompleteRead(b"", size)
        size -= len(block)
        yield block


def _parse_address(metadata: str) -> SplitResult:
    """Parse the address of a `DSQTransport`.

    Raises:
        LoadFailed: `metadata` is no address of a `DSQTransport`.
    """
    with suppress(ValueError):  # an invalid port or IPv6 address
        address = urlsplit(metadata)
        if address.scheme == "http" and address.hostname and address.port and _SECRET_PATH.fullmatch(address.path):
            return address
    raise LoadFailed("this is no address of a DSQTransport: all replicas need the same checkpoint_transport")


@contextmanager
def _explain_errors(metadata: str, step: int, timeout: timedelta) -> Iterator[None]:
    """Convert errors of a download in this context to errors that describe the request and the cause.

    Raises:
        LoadFailed, CorruptCheckpoint: the download failed.
    """
    subject = f"the state of step {step} from {metadata!r}"
    try:
        yield
    except TimeoutError as error:
        raise LoadFailed(
            f"{subject}: timed out after {timeout.total_seconds():g} s; the sender is busy or has gone: the manager "
            "tries again in its next step, and waits longer with a larger timeout"
        ) from error
    except (OSError, UnicodeError, http.client.HTTPException, tarfile.TarError, CheckpointNotFound) as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE_ERRORS:
            raise LoadFailed(f"{subject}: {described(error)}; free space here, or name another directory=") from error
        lacks_manifest = isinstance(error, CheckpointNotFound)
        reason = "its manifest, which comes last, is missing" if lacks_manifest else described(error)
        raise LoadFailed(
            f"{subject}: {reason}; the sender has ended, or cannot be reached: the manager tries again in its next "
            "step, with a replica that is there"
        ) from error
    except DSQError as error:
        # The remaining text is about arguments of `load`.
        reason, is_not_plain, _ = str(error).partition("; unpickling it can run code")
        advice = ": let the state_dict of the sender return tensors and plain data in its place" if is_not_plain else ""
        raise type(error)(f"{subject}: {reason}{advice}") from error


def _restore_sharding(state: Any, paths: Set[str], reference: Any) -> Any:
    """Return a state whose tensors at `paths` are DTensors, sharded as in the state `reference`.

    Raises:
        LoadFailed: `reference` has no DTensor at one of the paths, or its local shard has another shape.
    """
    leaves = tree_flatten_with_path(reference)[0]
    dtensors = {keystr(path): value for path, value in leaves if isinstance(value, DTensor)}
    if missing := sorted(paths - dtensors.keys()):
        raise LoadFailed(
            f"state{missing[0]} is the shard of a DTensor, and no DTensor is there in the state of this process: give "
            "DSQTransport(state_dict=...) that returns one, with the optimizer's state by get_optimizer_state_dict, "
            "which has it before the first step too"
        )

    def to_dtensor(path: Any, value: Any) -> Any:
        if (name := keystr(path)) not in paths or not isinstance(value, torch.Tensor):
            return value
        dtensor = dtensors[name]
        if value.shape != dtensor.to_local().shape:
            raise LoadFailed(
                f"state{name}: the shard is of shape {tuple(value.shape)}, and of "
                f"{tuple(dtensor.to_local().shape)} here: all replicas need the same number of ranks and sharding"
            )
        return DTensor(value.to(dtensor.device), dtensor._spec, requires_grad=False)  # from_local may communicate

    return tree_map_with_path(to_dtensor, state)
