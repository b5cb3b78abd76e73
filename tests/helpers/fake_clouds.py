"""File systems that answer as gcsfs (gs://) and adlfs (az://) do, from the memory of this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem


class AzureError(Exception):
    """The base of azure.core's errors."""


class HttpResponseError(AzureError):
    """Error of azure.core for an answer with a status; its text has several lines."""

    def __init__(self, status: int, code: str, message: str) -> None:
        text = f"{message}\nRequestId:1234\nErrorCode:{code}\nContent: <?xml version='1.0'?><Error>\n{message}</Error>"
        super().__init__(text)
        self.status_code = status


class ResourceNotFoundError(HttpResponseError):
    """Error of azure.core for a status of 404."""


class HttpError(Exception):
    """Error of gcsfs for an answer with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message}, {status}")
        self.code = status


class FakeCloud(AbstractFileSystem):
    """The part that both have in common.

    Attributes:
        buckets: objects of each bucket by their keys.
        fault: called before each request, to raise the error of a test.
        asked: names of the requests.
    """

    cachable = False
    buckets: dict[str, dict[str, bytes]]
    fault: Callable[[str], None]
    asked: list[str]

    def _keys(self, request: str, path: str) -> tuple[dict[str, bytes] | None, str, str]:
        self.asked.append(request)
        self.fault(request)
        bucket, _, key = path.partition("://")[2].strip("/").partition("/")
        return self.buckets.get(bucket), bucket, key

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        keys, bucket, key = self._keys("ls", path)
        if keys is None:
            raise self._missing(path)
        prefix = f"{key}/" if key else ""
        below = [name[len(prefix) :] for name in keys if name.startswith(prefix)]
        names = {name.partition("/")[0]: "/" in name for name in below}
        if key and not names:
            raise self._missing(path)
        return [
            {"name": f"{bucket}/{prefix}{name}", "type": "directory" if directory else "file",
             "size": None if directory else len(keys[prefix + name])}
            for name, directory in names.items()
        ]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        keys, bucket, key = self._keys("info", path)
        if keys is None or (key and key not in keys):
            raise self._missing(path)
        return {"name": f"{bucket}/{key}", "type": "file" if key else "directory", "size": len(keys.get(key, b""))}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        keys, _bucket, key = self._keys("cat_file", path)
        if keys is None or key not in keys:
            raise self._missing(path)
        return keys[key][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        keys, _bucket, key = self._keys("pipe_file", path)
        if keys is None:
            raise self._no_bucket_of_an_upload(path)
        if mode == "create" and key in keys:
            raise FileExistsError(path)
        keys[key] = value

    def rm_file(self, path: str) -> None:
        keys, _bucket, key = self._keys("rm_file", path)
        if keys is None or key not in keys:
            raise self._missing(path)
        del keys[key]

    def _missing(self, path: str) -> Exception:
        return FileNotFoundError(path)

    def _no_bucket_of_an_upload(self, path: str) -> Exception:
        return self._missing(path)


class FakeGoogle(FakeCloud):
    """Errors of gcsfs: a missing bucket is a missing file."""

    protocol = "gs"


class FakeAzure(FakeCloud):
    """Errors of adlfs: a missing container is a missing file for reads, and an error of azure.core for uploads."""

    protocol = "az"

    def _missing(self, path: str) -> Exception:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _no_bucket_of_an_upload(self, path: str) -> Exception:
        return ResourceNotFoundError(404, "ContainerNotFound", "The specified container does not exist.")


@contextmanager
def fake_cloud(protocol: str, bucket: str) -> Iterator[type[FakeCloud]]:
    """Serve a protocol, with one bucket, which is empty."""
    kind = {"gs": FakeGoogle, "az": FakeAzure}[protocol]
    kind.buckets, kind.asked, kind.fault = {bucket: {}}, [], staticmethod(lambda _: None)
    before = _registry.pop(protocol, None)
    fsspec.register_implementation(protocol, kind, clobber=True)
    try:
        yield kind
    finally:
        _registry.pop(protocol, None)
        if before is not None:
            _registry[protocol] = before
