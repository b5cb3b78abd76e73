"""A server of S3 in a process of its own, with an empty bucket for each test."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SERVER = """
import functools, logging, sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Dispatcher
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
Dispatcher.get_backend_for_host = functools.cache(Dispatcher.get_backend_for_host)  # it lists directories each time
WSGIRequestHandler.disable_nagle_algorithm = True  # else a body waits 40 ms, until its headers are acknowledged
WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay open
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()  # until the tests end, however they end
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's server; yields its address."""
    _read_models_once()
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, **SETTINGS},
    ) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "moto's server did not start"
            yield address
        finally:
            process.kill()


def _read_models_once() -> None:
    """Let botocore keep its models of services, which it would read for each of the clients of a test: 0.2 s."""
    session = importlib.import_module("botocore.session")
    session.create_loader = functools.cache(session.create_loader)


def new_bucket(address: str) -> str:
    """Make a bucket; its name."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT")).close()  # moto asks for no keys
    return name
