"""All that ranks of MPI do, in one launch: argv = a directory with sources, an empty directory.

The command line compresses a file before anything else. The communicator keeps its contract. Every source is compressed
to a checkpoint of its name, and a state dict that all ranks have in memory. Parts that are read one by one are read by
one rank each. Where one rank fails all do, and nothing is committed. At the end the command line fails, and with it the
job.
"""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dsq_ckpt
from dsq_ckpt.convert import partitioner, sources
from dsq_ckpt.distributed.mpi import MPICommunicator
from dsq_ckpt.engine import pipeline
from dsq_ckpt.storage.manifest import is_complete
from tests.helpers import contract
from tests.helpers.source_files import plain_state

given, output = Path(sys.argv[1]), Path(sys.argv[2])


def command(*arguments: object) -> None:
    """Be `dsq compress` with arguments."""
    sys.argv = ["dsq", "compress", *map(str, arguments)]
    runpy.run_module("dsq_ckpt.cli", run_name="__main__")


try:
    command(given / "plain.safetensors", output / "command", "--json")
except SystemExit as ended:
    assert not ended.code, ended
comm = MPICommunicator()
contract.check_communicator(comm)
comm.limit = 64  # many calls where one would do
contract.check_communicator(comm)
del comm.limit
partitioner._MIN_PART_BYTES = 1 << 10


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Elements that this rank reads where reading is not free."""
    read: list[int] = []
    original = sources._DCPSource.read, sources._DSQSource.read

    def counting(which: Callable[..., Any]) -> Callable[..., Any]:
        def reading(self: Any, keys: Any) -> Any:
            known = list(keys)
            read.append(sum(math.prod(key.shape) for key in known))
            return which(self, known)

        return reading

    with mock.patch.object(sources._DCPSource, "read", counting(original[0])), \
            mock.patch.object(sources._DSQSource, "read", counting(original[1])):
        yield read


def fails(work: Callable[[], Any], target: Path, says: str) -> None:
    """All ranks raise soon, the reason reaches rank 0, and there is no checkpoint."""
    start, text = time.monotonic(), ""
    try:
        work()
    except dsq_ckpt.DSQError as error:
        text = str(error)
    texts = comm.gather(text)
    assert all(texts) and says in texts[0] and time.monotonic() - start < 120, (says, texts)
    assert not is_complete(target)


for name, path in json.loads((given / "sources.json").read_text()).items():
    with counted() as read:
        dsq_ckpt.compress(path, output / name, communicator=comm)
    everywhere = comm.gather(sum(read))
    if name.startswith(("dcp", "dsq")):
        stored = sources.open_source(path).tensors.values()
        total = sum(math.prod(tensor.shape) for tensor in stored)
        assert sum(everywhere) == total and max(everywhere) < 0.5 * total, (name, everywhere, total)

state = {"w": torch.ones(80, 80)}
out = output / "failed"


def compress(source: Any = state, **options: Any) -> None:
    dsq_ckpt.compress(source, out, communicator=comm, **options)


fails(lambda: compress(given / "nowhere"), out, "does not exist; name a .safetensors")
damaged = json.loads((given / "damaged.json").read_text())
for path, says in damaged.items():
    fails(lambda path=path: compress(path), out, says)
fails(lambda: compress({"w": torch.ones(80, 80 + comm.rank // 3)}), out, "rank 3 was given another source than rank 0")
fails(lambda: compress(config="exact" if comm.rank == 2 else None), out, "different configurations")
fails(lambda: compress(evaluate=lambda: 1.0, model=torch.nn.Linear(3, 3)), out, "leave it out, or communicator")
fails(lambda: compress(config={"system": "lc"}), out, "compresses differences to a parent")


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


for moment in ("write_rank", "commit"):
    culprit = 0 if moment == "commit" else 2
    if comm.rank == culprit:
        with mock.patch.object(pipeline, moment, full):
            fails(compress, out, "No space left on device")
    else:
        fails(compress, out, "No space left on device")
compress()
try:
    compress()
except dsq_ckpt.DSQError as error:
    assert "holds a complete checkpoint" in str(error)
else:
    raise AssertionError("it was replaced")
compress(overwrite=True)
result = dsq_ckpt.compress(plain_state(), output / "memory", communicator=comm)
assert comm.gather(result) == [dsq_ckpt.describe(output / "memory") | {"quality": None}] * comm.size
if comm.rank == 0:
    print("ok", comm.size, flush=True)
command(given / "lost", output / "failed_command", "--json")
