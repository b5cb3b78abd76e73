"""Errors of requests to object stores: which pass, and which error of this package says what to do.

fsspec's packages raise errors of their own, of the client library, or of the operating system. Since no such package is
imported here, errors are told by the names of their classes, by their status, and else by their text.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from dsq_ckpt.core.urls import RemoteError, RemotePath
from dsq_ckpt.errors import ConfigError, DSQError

_TRANSIENT_ERRNOS = (errno.EBUSY, errno.EIO, getattr(errno, "EREMOTEIO", errno.EIO), errno.ECONNRESET, errno.ETIMEDOUT)
_NETWORK_ERRORS = frozenset({
    "EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "HTTPClientError", "FSTimeoutError",
    "ServerDisconnectedError", "ServiceRequestError", "ServiceResponseError",
})
_ACCESS_ERRORS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ClientAuthenticationError", "GoogleAuthError",
    "CredentialUnavailableError",
})
_DENIED = (401, 403)
_MOVED_ERRNO = getattr(errno, "EREMCHG", -1)
_NO_BUCKET = re.compile(r"specified (?:bucket|container) does not exist|bucket not found|no such bucket")


class _Settings(NamedTuple):
    """Names of settings to check."""

    credentials: str
    endpoint: str


_AWS = _Settings("AWS_ACCESS_KEY_ID or AWS_PROFILE", "AWS_ENDPOINT_URL")
_GOOGLE = _Settings("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST")
_AZURE = _Settings(
    "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY",
    "that of AZURE_STORAGE_CONNECTION_STRING",
)
GOOGLE_PROTOCOLS, AZURE_PROTOCOLS = ("gs", "gcs"), ("az", "abfs", "abfss")
_SETTINGS = {**dict.fromkeys(GOOGLE_PROTOCOLS, _GOOGLE), **dict.fromkeys(AZURE_PROTOCOLS, _AZURE)}
_LOST_NAMES = re.compile(r"[?\[\]:\\\x00-\x1f\x7f]|^ | $|#$|\.$")
"""Names that adlfs and Azure cut or change, so that two paths would be one, or a path could not be listed."""


def get_protocol(path: Path) -> str:
    """Return the protocol of a URL."""
    return str(path).partition("://")[0]


def require_faithful_names(path: RemotePath) -> None:
    """Raise ConfigError for a URL with a name that fsspec's package, or the store, does not keep as it is."""
    names = path.parts[2:]
    if any("?versionid=" in name.lower() for name in names):
        raise ConfigError(f"'{path}' cannot be used: names with '?versionId=' ask for a version; choose another path")
    if get_protocol(path) in AZURE_PROTOCOLS:
        for name in names:
            if _LOST_NAMES.search(name):
                raise ConfigError(
                    f"'{path}' cannot be used: Azure and adlfs do not keep the name {name!r} as it is; choose one "
                    "without ? [ ] : \\ and control characters, with no space at its ends and no # or dot at its end"
                )


def translate_setup_error(error: Exception, path: Path) -> ConfigError:
    """Return the error to raise if there is no file system for a URL."""
    if isinstance(error, ImportError) or "protocol" in f"{error}".lower():
        hint = (
            "s3:// needs `pip install 'dsq_ckpt[remote]'`, other protocols fsspec's package for them, such as gcsfs "
            "(gs://) or adlfs (az://)"
        )
    else:
        hint = f"check the credentials, such as {_get_settings(path).credentials}, and fsspec's configuration"
    return ConfigError(f"'{path}': this URL cannot be used ({error}); {hint}")


def is_transient(error: Exception) -> bool:
    """Return whether a request that failed may be repeated."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    if _class_names(error) & _NETWORK_ERRORS:  # the package has retried already
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


def is_elsewhere(error: Exception) -> bool:
    """Return whether an error of a request is not about its object: the network, or the access."""
    return is_transient(error) or is_denied(error) or bool(_class_names(error) & _NETWORK_ERRORS)


def is_denied(error: BaseException | None) -> bool:
    """Return whether an error says that credentials are missing, wrong, or do not suffice."""
    if isinstance(error, PermissionError) or _class_names(error) & _ACCESS_ERRORS:
        return True
    if isinstance(error, OSError) and str(error).startswith("Forbidden"):  # gcsfs
        return True
    while error is not None:
        if getattr(error, "status_code", None) in _DENIED or getattr(error, "code", None) in _DENIED:
            return True
        error = error.__cause__
    return False


def no_bucket(path: Path, text: str) -> RemoteError:
    """Return the error that the bucket of a URL does not exist."""
    root = path.root_url if isinstance(path, RemotePath) else str(path)
    return RemoteError(errno.ENODEV, f"'{root}' does not exist ({text}): check the bucket's name", str(path))


def translate_error(error: Exception, path: Path) -> Exception:
    """Return the error to raise for a failed request: mostly an OSError that names the URL and a remedy."""
    if isinstance(error, DSQError | RemoteError | MemoryError):
        return error
    text, names = f"{error}".strip() or type(error).__name__, _class_names(error)
    if "AzureError" in names:
        text = text.splitlines()[0]  # the rest repeats it, with times and XML
    low, url, settings = text.lower(), str(path), _get_settings(path)
    if _NO_BUCKET.search(low):
        return no_bucket(path, text)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", url)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url)
    if is_denied(error):
        hint = f"check the credentials, such as {settings.credentials}, and what they may do with the bucket"
        return RemoteError(errno.EACCES, f"access is denied ({text}): {hint}", url)
    if settings is _AWS and ("region" in low or getattr(error, "errno", None) == _MOVED_ERRNO):
        hint = "check the region, such as AWS_DEFAULT_REGION, and the endpoint"
        return RemoteError(errno.EINVAL, f"the bucket is in another region ({text}): {hint}", url)
    if isinstance(error, TimeoutError | ConnectionError) or names & _NETWORK_ERRORS:
        hint = f"check the network and the endpoint, such as {settings.endpoint}"
        return RemoteError(errno.ETIMEDOUT, f"the object store does not answer ({text}): {hint}", url)
    region = ", region" if settings is _AWS else ""
    hint = f"check credentials{region} and endpoint, and try again"
    return RemoteError(errno.EIO, f"a request to the object store failed ({type(error).__name__}: {text}): {hint}", url)


def _get_settings(path: Path) -> _Settings:
    return _SETTINGS.get(get_protocol(path), _AWS)


def _class_names(error: BaseException | None) -> set[str]:
    """Return the class names of an error and its causes."""
    names: set[str] = set()
    while error is not None:
        names |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__
    return names
