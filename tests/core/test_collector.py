"""The collector is as it was before a pause, however the block ends; imports of the package are such blocks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from dsq_ckpt.core.collector import no_garbage_collection


@pytest.fixture(autouse=True)
def _kept():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began(enabled) -> None:
    (gc.enable if enabled else gc.disable)()
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(ValueError, match="of the block"), no_garbage_collection():
        raise ValueError("of the block")
    assert gc.isenabled() is enabled


def test_other_threads_pause_nothing_and_their_forks_collect() -> None:
    gc.enable()
    results = []

    def other() -> None:
        results.append(gc.isenabled())
        with no_garbage_collection():
            results.append(gc.isenabled())
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        results.append(os.waitpid(child, 0)[1])

    with no_garbage_collection():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert results == [False, False, 0] and gc.isenabled()
    results.clear()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert results == [True, True, 0]


IMPORTS = """
import gc, os, torch.distributed.checkpoint
full = []
gc.callbacks.append(lambda phase, about: full.append(about) if about["generation"] == 2 else None)
for setting in ("enable", "disable"):
    child = os.fork()  # where nothing of the package is imported, while torch is imported once
    if child:
        print(setting, os.waitpid(child, 0)[1])
        continue
    getattr(gc, setting)()
    from dsq_ckpt import DSQStorageWriter, load, save
    assert gc.isenabled() is (setting == "enable")
    assert not full
    DSQStorageWriter("run/1")
    assert gc.isenabled() is (setting == "enable")
    os._exit(0)
"""


@pytest.fixture(scope="module")
def statuses() -> list[str]:
    """How processes ended that import the package with the collector on, and off."""
    command = [sys.executable, "-u", "-c", IMPORTS]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


@pytest.mark.parametrize("setting", ["enable", "disable"])
def test_imports_leave_the_collector_as_it_is_and_look_through_all_objects_never(statuses, setting) -> None:
    assert f"{setting} 0" in statuses
