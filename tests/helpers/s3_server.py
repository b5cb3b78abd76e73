"""A server of S3 in a process of its own, with an empty bucket for each test."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.disable_nagle_algorithm = True  # else a body waits 40 ms, until its headers are acknowledged
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()  # until the tests end, however they end
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's server; yields its address."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, **SETTINGS},
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def new_bucket(address: str) -> str:
    """Make a bucket; its name."""
    import fsspec

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    system = fsspec.filesystem(
        "s3", endpoint_url=address, key="test", secret="test", skip_instance_cache=True, use_listings_cache=False
    )
    system.mkdir(name)
    return name
