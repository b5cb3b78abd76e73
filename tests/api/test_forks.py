"""Children that are forked while a save is under way, as workers of a data loader are."""

from __future__ import annotations

import os
import signal

import pytest

from dsq_ckpt.core.interrupts import hold_signals
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes

# An object that is pickled in the background holds the save there; a thread holds every lock that another may hold.
SLOW = """
import threading

saving, done = threading.Event(), threading.Event()


class Slow:
    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        if threading.current_thread() is not threading.main_thread():
            saving.set()
            done.wait()
        return {}
"""
SCRIPT = SLOW + """
import os, sys
import torch
import torch.distributed as dist
import dsq_ckpt
from dsq_ckpt.engine import parent_integrity
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.core import regular_files; from dsq_ckpt.storage import pickle_refs

if "group" in sys.argv:
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store"), rank=0, world_size=1)
run = sys.argv[1] + "/run"
held = threading.Event()


def hold():
    with default_history()._lock, regular_files._lock, pickle_refs._lock:
        held.set()
        done.wait()


def child():
    own = {"w": state["w"] + 0.001}
    if "group" in sys.argv:
        try:
            dsq_ckpt.save(own, run + "/refused")
        except dsq_ckpt.SaveFailed as error:
            assert "forked from rank 0" in str(error) and "no_dist=True" in str(error), error
        try:
            dsq_ckpt.load(own, run + "/first")
        except dsq_ckpt.LoadFailed as error:
            assert "forked from rank 0" in str(error), error
    alone = {"no_dist": True} if "group" in sys.argv else {}
    dsq_ckpt.save(own, run + "/child-1", **alone)
    result = dsq_ckpt.async_save(own, run + "/child-2", **alone).result()
    assert result.depth == 2, result  # it goes on with the chain
    dsq_ckpt.load({"w": torch.empty(200, 300)}, run + "/child-2", **alone)
    sys.exit(3)


state = {"w": torch.randn(200, 300)}
dsq_ckpt.save(state, run + "/first")
future = dsq_ckpt.async_save(state | {"slow": Slow()}, run + "/second")
saving.wait()
threading.Thread(target=hold).start()
held.wait()
forked = os.fork()
if not forked:
    child()
print("CHILD", os.waitpid(forked, 0)[1])
done.set()
future.result()
dsq_ckpt.save(state, run + "/third")
"""


@pytest.mark.parametrize("group", ["", "group"])
def test_a_child_saves_and_ends_while_its_parent_saves(tmp_path, group):
    status, output = processes.run(["-c", SCRIPT, str(tmp_path), group], forked=True)
    assert status == 0 and f"CHILD {3 << 8}" in output, output
    run = tmp_path / "run"
    assert not (run / "refused").exists()
    assert Manifest.read(run / "second").previous_name == Manifest.read(run / "child-1").previous_name == "first"
    assert Manifest.read(run / "third").previous_name == "second" and Manifest.read(run / "third").depth == 2


LOADER = SLOW + """
import sys
import torch
import dsq_ckpt


class Saves(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        dsq_ckpt.save({"w": torch.ones(200, 300)}, f"{sys.argv[1]}/worker/{index}")
        return index


future = dsq_ckpt.async_save({"w": torch.ones(9), "slow": Slow()}, sys.argv[1] + "/run/1")
saving.wait()
loader = torch.utils.data.DataLoader(Saves(), num_workers=2, multiprocessing_context="fork", timeout=60)
print("LOADED", sorted(int(batch) for batch in loader))
done.set()
future.result()
"""


ENDED = """
import os, sys
import torch
import torch.distributed as dist
import dsq_ckpt

for number in range(2):  # the group of an ended torch.distributed is not that of the next one
    store = dist.FileStore(f"{sys.argv[1]}/store{number}")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dsq_ckpt.async_save({"w": torch.ones(200, 300)}, f"{sys.argv[1]}/run/{number}").result()
    dist.destroy_process_group()
child = os.fork()
if not child:
    dsq_ckpt.save({"w": torch.ones(200, 300)}, sys.argv[1] + "/run/child")
    os._exit(3)
print("CHILD", os.waitpid(child, 0)[1])
store = dist.FileStore(sys.argv[1] + "/last")
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dsq_ckpt.async_save({"w": torch.ones(200, 300)}, sys.argv[1] + "/run/last").result()
child = os.fork()
if not child:
    dist.destroy_process_group()
    os._exit(4)
print("ENDS IT", os.waitpid(child, 0)[1])
dist.destroy_process_group()
"""


def test_a_child_lives_after_torch_distributed_was_ended(tmp_path):
    """Else the group that background saves ran on is freed in the child, and waits for threads that are not there."""
    status, output = processes.run(["-c", ENDED, str(tmp_path)], forked=True)
    assert status == 0 and f"CHILD {3 << 8}" in output and f"ENDS IT {4 << 8}" in output, output


def test_workers_of_a_data_loader_save(tmp_path):
    status, output = processes.run(["-c", LOADER, str(tmp_path)], forked=True)
    assert status == 0 and "LOADED [0, 1]" in output, output
    assert [Manifest.read(tmp_path / "worker" / name).depth for name in "01"] == [0, 0]


def test_a_child_has_its_handlers_back():
    """Signals that a save holds would be held in it for good, SIGTERM of whoever ends it among them."""
    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    try:
        with hold_signals():
            child = os.fork()
            if not child:
                signal.raise_signal(signal.SIGUSR1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert signal.getsignal(signal.SIGUSR1).__name__ == "handle"
    finally:
        signal.signal(signal.SIGUSR1, before)
