"""Recovery of replicas in torchft, with a state that is compressed bit for bit on its way.

    manager = Manager(..., checkpoint_transport=DSQTransport())

A replica that is behind gets the state of one that is not over HTTP, as by torchft's `HTTPTransport`. What is sent is a
checkpoint of this package in an archive (tar): a keyframe with the preset "exact", and its manifest last. So each byte
is checked before it is used, and nothing is unpickled but plain data.
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

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOST = 4096
"""Bytes of an answer that refuses."""
_BLOCK = 1 << 20
_SECRET = re.compile(r"/[0-9a-f]+/")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DSQTransport(CheckpointTransport[T]):
    """A `CheckpointTransport` of losslessly compressed states, for `Manager(checkpoint_transport=DSQTransport())`.

    A state is nested dicts and lists of tensors and plain data. Tensors arrive on the CPU, bit for bit; sharded ones
    (`DTensor`) with the sharding of the receiver, whose rank is that of the sender in another replica.

    Args:
        timeout: how long a request waits for a state to be sent, and `disallow_checkpoint` for requests under way.
        state_dict: returns the state of this process, as the manager's own `state_dict` entries do in its dict; needed
            where it has sharded tensors, and otherwise unused.
        directory: for the compressed state, until it is sent or loaded; None: the system's for temporary files.

    Raises:
        ConfigError: an argument is not what it must be.
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
        self._changed = threading.Condition()
        self._served: tuple[int, tempfile.TemporaryDirectory[str]] | None = None
        self._reading: list[object] = []  # what is served to each request under way
        self._closed = False
        self.secret = secrets.token_hex(16)  # ports are used again, also by other jobs
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return the address of this process, which `recv_checkpoint` of others asks."""
        return f"http://{socket.gethostname()}:{self._server.server_port}/{self.secret}/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Compress a state and let other replicas fetch it; returns when it is compressed, and may be changed then.

        Raises:
            ConfigError: it has sharded tensors, and `DSQTransport` was made without `state_dict`.
            SaveFailed: it cannot be stored; the message names the tensor. Or `shutdown` was called.
        """
        self.disallow_checkpoint()
        place = self._temporary()
        try:
            sharded: list[str] = []

            def local(path: Any, value: Any) -> Any:
                if not isinstance(value, DTensor):
                    return value
                if self._state_dict is None:
                    raise ConfigError(
                        f"state{keystr(path)} is a DTensor, whose mesh is not sent: give DSQTransport(state_dict=...), "
                        "so that a receiver knows the sharding of its own"
                    )
                sharded.append(keystr(path))
                return value.to_local()

            state = tree_map_with_path(local, state_dict)
            save(
                {"state": state, "sharded": sharded}, Path(place.name, "state"), config=self._config, parent=None,
                no_dist=True, history=SaveHistory(),
            )
        except BaseException:
            place.cleanup()
            raise
        with self._changed:
            if not self._closed:
                self._served = step, place
                self._changed.notify_all()
                return
        place.cleanup()
        raise SaveFailed(f"the state of step {step} is not sent, as the DSQTransport was shut down")

    def disallow_checkpoint(self) -> None:
        """Wait for requests under way, at most for the timeout, and let no other begin until the next state is sent."""
        with self._changed:
            served, self._served = self._served, None
            if served is None:  # requests that were given up, if any, are not waited for again
                return
            self._changed.wait_for(lambda: served not in self._reading, self.timeout.total_seconds())
        served[1].cleanup()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of another replica.

        Args:
            src_rank: unused.
            metadata: what `metadata` returned there.
            step: the step that it has to be of.
            timeout: how long to wait for the state, and for each part of it.

        Returns:
            The state, on the CPU.

        Raises:
            LoadFailed: it did not come in time, or not whole, is of another step, or has a class that is no plain data.
            CorruptCheckpoint: bytes were altered.
        """
        with _explained(metadata, step, timeout), self._temporary() as place:
            _fetch(_address(metadata), step, Path(place), timeout)
            found: dict[str, Any] = {}
            load(found, place, no_dist=True, history=SaveHistory())
            if found.keys() != {"state", "sharded"} or not isinstance(found["sharded"], list):
                raise LoadFailed("it sends a checkpoint that is none of a DSQTransport of this version")
            state: T = found["state"]
            if found["sharded"]:
                paths = {str(path) for path in found["sharded"]}
                state = _sharded(state, paths, None if self._state_dict is None else self._state_dict())
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and remove what is left; with `wait` it is done on return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        if wait:
            closing.join()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.disallow_checkpoint()

    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(
            prefix="dsq_ckpt-torchft-", dir=self._directory, ignore_cleanup_errors=True  # a request may still read it
        )

    @contextmanager
    def serving(self, step: int) -> Iterator[Path]:
        """Yield the directory with the state of a step, as soon as it is sent; it stays during the block.

        Raises:
            LookupError: that of a later step is served, or none in time.
        """
        def sent() -> bool:  # a receiver may be there before the sender has left the step before
            return self._closed or (self._served is not None and self._served[0] >= step)

        with self._changed:
            self._changed.wait_for(sent, self.timeout.total_seconds())
            served = self._served
            if served is None:
                raise LookupError("no state was sent in time")
            if served[0] != step:
                raise LookupError(f"the state of step {served[0]} is served, not of step {step}")
            self._reading.append(served)
        try:
            yield Path(served[1].name, "state")
        finally:
            with self._changed:
                self._reading.remove(served)
                self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    """Serves the state of a transport, on all addresses of the host."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, transport: DSQTransport[Any]) -> None:
        self.transport = transport
        super().__init__(("", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what is wrong with a connection, as one that was reset; the default writes a traceback to stderr."""
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
        """Answer with the archive of a state."""
        transport = self.server.transport
        prefix, _, step = self.path.rpartition("/")
        try:
            if not (secrets.compare_digest(prefix.encode(), f"/{transport.secret}".encode()) and step.isdecimal()):
                raise LookupError("this is no address of a DSQTransport, or of one that has ended")
            with transport.serving(int(step)) as place:
                self.send_response(200)
                self.send_header("Content-Type", "application/x-tar")
                self.end_headers()
                with tarfile.open(fileobj=self.wfile, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                    for name in sorted(os.listdir(place), key=lambda name: (name == MANIFEST, name)):
                        with open(place / name, "rb") as file:
                            member = tarfile.TarInfo(name)
                            member.size = os.fstat(file.fileno()).st_size
                            archive.addfile(member, file)
        except LookupError as error:
            with suppress(OSError):  # it may have gone while it waited
                self._refuse(str(error))
        except OSError as error:  # the receiver has gone, or is too slow
            logger.warning("the state of step %s was not sent: %s", step, described(error))
            self.close_connection = True

    def _refuse(self, reason: str) -> None:
        body = reason.encode()
        self.send_response(HTTPStatus.CONFLICT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.info(format, *arguments)


def _fetch(address: SplitResult, step: int, place: Path, timeout: timedelta) -> None:
    """Write the files of another replica's state to a directory.

    Raises:
        LoadFailed: the other one refuses, or sends what is no archive of files.
        OSError, HTTPException, TarError: it cannot be reached, or the archive ends too early.
    """
    seconds = max(timeout.total_seconds(), 1e-3)  # 0 would mean not to wait for the connection either
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)
    try:
        connection.request("GET", f"{address.path}{step}")
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise LoadFailed(f"it answers {response.read(_MOST).decode(errors='replace')!r}")
        # Not by tarfile.open, which makes large files of a few bytes (sparse ones) and takes headers of any length.
        while (header := b"".join(_blocks(response, tarfile.BLOCKSIZE))) != bytes(tarfile.BLOCKSIZE):
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            if member.type != tarfile.REGTYPE or member.size < 0 or not is_plain_name(member.name):
                raise LoadFailed(f"it sends {member.name!r}, which is no file of a checkpoint")
            with open(place / member.name, "xb") as file:
                file.writelines(_blocks(response, member.size))
            for _ in _blocks(response, -member.size % tarfile.BLOCKSIZE):  # padding
                pass
    finally:
        connection.close()


def _blocks(response: http.client.HTTPResponse, size: int) -> Iterator[bytes]:
    """Yield that many bytes of an answer.

    Raises:
        IncompleteRead: it ends before.
    """
    while size > 0:
        block = response.read(min(size, _BLOCK))
        if not block:
            raise http.client.IncompleteRead(b"", size)
        size -= len(block)
        yield block


def _address(metadata: str) -> SplitResult:
    """Return the parts of the address that a transport gave.

    Raises:
        LoadFailed: it is none of a `DSQTransport`.
    """
    with suppress(ValueError):  # of a port or an IPv6 address
        address = urlsplit(metadata)
        if address.scheme == "http" and address.hostname and address.port and _SECRET.fullmatch(address.path):
            return address
    raise LoadFailed("this is no address of a DSQTransport: all replicas need the same checkpoint_transport")


@contextmanager
def _explained(metadata: str, step: int, timeout: timedelta) -> Iterator[None]:
    """Say in one sentence what was to be fetched from where, and why it was not.

    Raises:
        LoadFailed, CorruptCheckpoint: it was not.
    """
    what = f"the state of step {step} from {metadata!r}"
    try:
        yield
    except TimeoutError as error:
        raise LoadFailed(
            f"{what}: timed out after {timeout.total_seconds():g} s; the sender is busy or has gone: the manager tries "
            "again in its next step, and waits longer with a larger timeout"
        ) from error
    except (OSError, UnicodeError, http.client.HTTPException, tarfile.TarError, CheckpointNotFound) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise LoadFailed(f"{what}: {described(error)}; free space here, or name another directory=") from error
        lacks_manifest = isinstance(error, CheckpointNotFound)
        found = "its manifest, which comes last, is missing" if lacks_manifest else described(error)
        raise LoadFailed(
            f"{what}: {found}; the sender has ended, or cannot be reached: the manager tries again in its next step, "
            "with a replica that is there"
        ) from error
    except DSQError as error:
        found, refused, _ = str(error).partition("; unpickling it can run code")  # what follows is for calls of `load`
        advice = ": let the state_dict of the sender return tensors and plain data in its place" if refused else ""
        raise type(error)(f"{what}: {found}{advice}") from error


def _sharded(state: Any, paths: Set[str], like: Any) -> Any:
    """Return a state whose tensors at `paths` are distributed ones, as they are in `like`.

    Raises:
        LoadFailed: `like` has no distributed tensor there, or one whose shard has another shape.
    """
    own = {keystr(path): value for path, value in tree_flatten_with_path(like)[0] if isinstance(value, DTensor)}
    if unknown := sorted(paths - own.keys()):
        raise LoadFailed(
            f"state{unknown[0]} is the shard of a DTensor, and no DTensor is there in the state of this process: give "
            "DSQTransport(state_dict=...) that returns one, with the optimizer's state by get_optimizer_state_dict, "
            "which has it before the first step too"
        )

    def distributed(path: Any, value: Any) -> Any:
        if (name := keystr(path)) not in paths or not isinstance(value, torch.Tensor):
            return value
        found = own[name]
        if value.shape != found.to_local().shape:
            raise LoadFailed(
                f"state{name}: the shard is of shape {tuple(value.shape)}, and of "
                f"{tuple(found.to_local().shape)} here: all replicas need the same number of ranks and sharding"
            )
        return DTensor(value.to(found.device), found._spec, requires_grad=False)  # from_local may communicate

    return tree_map_with_path(distributed, state)
