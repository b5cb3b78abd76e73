"""What all tests share."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
import signal
import sys
import uuid
import zlib
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch asks when it is imported; tests are for two cores, two at once

import hypothesis
import numpy as np
import pytest
import typer.testing
from _pytest.unraisableexception import gc_collect_iterations_key

from tests.helpers import forks
from tests.helpers.s3_server import SETTINGS, new_bucket, s3_server

# Torch, and what imports it, are imported where they are used: the process that waits for the workers of pytest-xdist
# does without, and they begin two seconds earlier.

_MEMORY, _ENOUGH = Path("/dev/shm"), 8 << 30
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ENOUGH:  # flushes to a disk take time
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))  # where pytest makes temporary directories

# It would make all commands anew, with their arguments and help, for each that a test runs: 11 ms.
if hasattr(typer.testing, "_get_command"):  # private
    typer.testing._get_command = functools.cache(typer.testing._get_command)
hypothesis.settings.register_profile("tests", hypothesis.settings(), deadline=None)  # a machine may be busy
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Let signals end processes, and every checkout build DeepSpeed's extensions for itself, not each other's anew."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; all processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[gc_collect_iterations_key] = 1  # at the end, where pytest walks over all objects five times
    assert config.cache is not None
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(config.cache.mkdir("torch_extensions")))
    if getattr(config.option, "dist", "no") == "no" or hasattr(config, "workerinput"):  # tests run in this process
        import torch

        if not torch.cuda.is_available():  # kernels for GPUs are interpreted then; Triton asks when it is imported
            os.environ.setdefault("TRITON_INTERPRET", "1")
    if forks.VARIABLE not in os.environ:  # not in workers of pytest-xdist
        stack = contextlib.ExitStack()
        stack.enter_context(forks.session())
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: one more than cores, since some tests wait for processes that are gone."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector off what is imported: it stays, and a walk of all of it takes half a second."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, by the seconds that `slow` marks tell, so that no worker ends with one alone."""
    seconds: Counter[Path] = Counter()
    for item in items:
        if mark := item.get_closest_marker("slow"):
            seconds[item.path] += mark.args[0] if mark.args else 10
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test, and fixtures that are made for it, draw the same numbers whichever tests came before it."""
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # nearly a millisecond less: it would note the stack for each kind of GPU that is not there
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def _nothing_loaded():
    """Let each test be as a process that has loaded no checkpoint: after a load, moments are saved with finer parts."""
    from dsq_ckpt.quantization import restored_values

    restored_values._loads = restored_values.LoadCounts()


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    """Compile the kernels before the first test: Numba changes the filters of warnings meanwhile, in its own thread."""
    from dsq_ckpt.engine import warmup

    for group in warmup.ALL:
        warmup.wait(group)


@pytest.fixture(scope="module", autouse=True)
def _no_stale_locks():
    """PyTorch waits without end for the lock of an extension whose build was killed; remove those nobody has open."""
    locks = set(Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve().glob("**/lock"))
    if locks:
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                locks.discard(descriptor.readlink())
            except OSError:  # closed meanwhile
                continue
    for lock in locks:
        lock.unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def _imported_later():
    """Keep the collector off what a module has imported while it ran, as off what is imported before the tests."""
    known = len(sys.modules)
    yield
    if len(sys.modules) > known + 50:
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests():
    """The chains a process remembers are module-level; every test starts without any."""
    from dsq_ckpt.engine.history import default_history

    default_history().clear()
    yield
    default_history().clear()


@pytest.fixture(scope="session")
def s3_address():
    """The address of a server of S3."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address, monkeypatch):
    """The URL of an empty bucket, which this process and its children can use."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": s3_address}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{new_bucket(s3_address)}"


@pytest.fixture(params=["memory", "s3"])
def store(request):
    """The URL of an empty place on an object store."""
    return request.getfixturevalue("bucket") if request.param == "s3" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def one_thread():
    """Torch on one thread: for models too small for more, whose threads would wait for those of other processes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_launcher(monkeypatch):
    """A process that no launcher started, and that has not imported mpi4py; to be changed."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "MPI_LOCAL", "LOCAL_")):
            monkeypatch.delenv(name)
    for name in list(sys.modules):
        if name.partition(".")[0] == "mpi4py":
            monkeypatch.delitem(sys.modules, name)
    return monkeypatch


@pytest.fixture
def forked_logs(monkeypatch):
    """Checkpointing processes of gradient logs are forks."""
    monkeypatch.setattr("subprocess.Popen", forks.popen)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with three checkpoints, and what they were made of; not to be changed."""
    from tests.helpers.small_run import small_run

    run = tmp_path_factory.mktemp("run")
    return run, small_run(run)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"
