"""`DSQTransport`: states arrive bit for bit, or there is one error that says why they did not."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchft.checkpointing import transport_test
from torchft.checkpointing.transport_test import make_state_dict, run_multi_recovery_test
from torchft.coordination import LighthouseServer

from dsq_ckpt.errors import ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.integrations.torchft import DSQTransport
from tests.helpers.processes import ROOT
from tests.integrations.torchft.between import between
from tests.integrations.torchft.common import PATIENCE, SHORT, large, same, small


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The limits of torchft's test, of 10 s each, are for an idle machine; what it leaves where it fails is ended."""
    barrier, completed = threading.Barrier, transport_test.as_completed

    def limit(seconds: int = 0, milliseconds: int = 0) -> timedelta:
        return timedelta(seconds=60 * seconds, milliseconds=milliseconds)

    monkeypatch.setattr(transport_test, "timedelta", limit)
    monkeypatch.setattr(threading, "Barrier", lambda size, timeout: barrier(size, timeout=60 * timeout))
    monkeypatch.setattr(transport_test, "as_completed", lambda futures, timeout: completed(futures, 60 * timeout))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_patient")
def test_the_contract_that_torchft_tests(tmp_path: Path) -> None:
    """Torchft's own test of transports: three replicas, of which two and one recover, distributed tensors, timeouts."""
    device = torch.device("cpu")

    def state() -> dict[str, object]:
        return make_state_dict(device)

    def make_transport(rank: int, size: int) -> DSQTransport[dict[str, object]]:
        return DSQTransport(PATIENCE, state_dict=state, directory=tmp_path)

    run_multi_recovery_test(TestCase(), make_transport, device)
    assert os.listdir(tmp_path) == []


def test_state_of_training_arrives_bit_for_bit(transport: DSQTransport[Any]) -> None:
    """Also what is no tensor, with its types, and tensors of all kinds."""
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {
        "user": {"default": {
            "model": dict(model.state_dict()), "optim": optimizer.state_dict(), "schedule": schedule.state_dict(),
            "more": {
                "empty": {}, "list": [1, 2.5, None, "text", True], "pair": (1, "a"), "nan": float("nan"),
                7: torch.randn(6, 8)[:, ::2], "half": torch.randn(50).bfloat16(), "none": torch.empty(0, 3),
                "scalar": torch.tensor(-0.0), "bools": torch.rand(9) > 0.5, "ints": torch.arange(5),
                "odd": torch.tensor([float("nan"), float("inf"), 1e-42]), "large": 1 << 80,
            },
        }},
        "torchft": {"step": 12, "batches_committed": 24},
    }
    transport.send_checkpoint([1], 12, state, PATIENCE)
    expected = {key: value for key, value in model.state_dict().items()}
    same(transport.recv_checkpoint(0, transport.metadata(), 12, PATIENCE), state)
    with torch.no_grad():
        before = model[0].weight.clone()
        model[0].weight.add_(1)  # the state was copied
    again = transport.recv_checkpoint(0, transport.metadata(), 12, PATIENCE)
    assert torch.equal(again["user"]["default"]["model"]["0.weight"], before)
    assert expected.keys() == again["user"]["default"]["model"].keys()


def test_another_step_is_refused(transport: DSQTransport[Any]) -> None:
    transport.send_checkpoint([1], 5, small(), PATIENCE)
    with pytest.raises(LoadFailed, match=r"the state of step 3 from .*: it answers 'the state of step 5 is served"):
        transport.recv_checkpoint(0, transport.metadata(), 3, PATIENCE)


@pytest.mark.parametrize("state", [{}, [], None, 5, torch.ones(3), {"user": {}}])
def test_states_that_are_next_to_nothing(state: Any, transport: DSQTransport[Any]) -> None:
    transport.send_checkpoint([1], 1, state, PATIENCE)
    same(transport.recv_checkpoint(0, transport.metadata(), 1, PATIENCE), state)


def test_a_request_waits_for_the_state(transport: DSQTransport[Any]) -> None:
    """Also while that of an earlier step is served, and after `disallow_checkpoint`; but not forever."""
    state = small()
    with ThreadPoolExecutor() as pool:
        for step in (1, 2):
            early = pool.submit(transport.recv_checkpoint, 0, transport.metadata(), step, PATIENCE)
            time.sleep(0.2)
            transport.send_checkpoint([1], step, state, PATIENCE)
            same(early.result(), state)
    transport.disallow_checkpoint()
    transport.disallow_checkpoint()
    with pytest.raises(LoadFailed, match=r"timed out after 0\.2 s"):
        transport.recv_checkpoint(0, transport.metadata(), 1, SHORT)


def test_a_sender_that_sends_nothing_in_time_says_so(tmp_path: Path) -> None:
    transport = DSQTransport[Any](timedelta(seconds=2), directory=tmp_path)  # it waits as long for the request itself
    with pytest.raises(LoadFailed, match="it answers 'no state was sent in time'"):
        transport.recv_checkpoint(0, transport.metadata(), 1, PATIENCE)
    transport.shutdown(wait=False)


def test_disallow_waits_for_what_is_under_way(transport: DSQTransport[Any]) -> None:
    state, hold, reached = large(), threading.Event(), threading.Event()

    def slow(passed: int, block: bytes) -> bytes:
        reached.set()
        assert hold.wait(PATIENCE.total_seconds())
        return block

    transport.send_checkpoint([1], 1, state, PATIENCE)
    with between(transport.metadata(), slow) as address, ThreadPoolExecutor() as pool:
        received = pool.submit(transport.recv_checkpoint, 0, address, 1, PATIENCE)
        assert reached.wait(PATIENCE.total_seconds())
        waits = pool.submit(transport.disallow_checkpoint)
        time.sleep(0.3)
        assert not waits.done()
        hold.set()
        same(received.result(), state)
        waits.result()


def test_a_receiver_that_does_not_read_stops_nobody(tmp_path: Path) -> None:
    """`disallow_checkpoint` gives it up after the timeout."""
    transport, hold = DSQTransport[Any](SHORT, directory=tmp_path), threading.Event()
    transport.send_checkpoint([1], 1, large(), PATIENCE)

    def stuck(passed: int, block: bytes) -> bytes:
        hold.wait(PATIENCE.total_seconds())
        return b""

    with between(transport.metadata(), stuck) as address, ThreadPoolExecutor() as pool:
        received = pool.submit(transport.recv_checkpoint, 0, address, 1, PATIENCE)
        transport.disallow_checkpoint()
        transport.shutdown()
        hold.set()
        with pytest.raises(LoadFailed, match="the sender has ended, or cannot be reached"):
            received.result()


def test_a_request_that_was_given_up_is_not_waited_for_again(tmp_path: Path) -> None:
    """A slow receiver delays one step, and not each one until it has read all."""
    transport, begun = DSQTransport[Any](SHORT, directory=tmp_path), time.monotonic()
    transport.send_checkpoint([1], 1, small(), PATIENCE)
    with transport.serve_state(1):
        transport.disallow_checkpoint()
        transport.timeout = PATIENCE
        transport.disallow_checkpoint()
        transport.send_checkpoint([1], 2, small(), PATIENCE)
        transport.disallow_checkpoint()
    assert time.monotonic() - begun < PATIENCE.total_seconds()
    transport.shutdown()


def test_distributed_tensors(transport: DSQTransport[Any], tmp_path: Path) -> None:
    """Are shards of the receiver's; without its state, or of another shape, they are refused by name."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = DeviceMesh("cpu", [0])
        full = torch.randn(8, 6)
        state = {"user": {"w": distribute_tensor(full, mesh, [Shard(0)]), "plain": torch.ones(3)}}
        with pytest.raises(ConfigError, match=r"state\['user'\]\['w'\] is a DTensor.*state_dict="):
            transport.send_checkpoint([1], 1, state, PATIENCE)
        own = {"user": {"w": distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)])}}
        healed = DSQTransport[Any](PATIENCE, state_dict=lambda: own, directory=tmp_path)
        healed.send_checkpoint([1], 1, state, PATIENCE)
        received = healed.recv_checkpoint(0, healed.metadata(), 1, PATIENCE)
        assert received["user"]["w"].placements == (Shard(0),) and torch.equal(received["user"]["w"].to_local(), full)
        own["user"]["w"] = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
        with pytest.raises(LoadFailed, match=r"\['w'\]: the shard is of shape \(8, 6\), and of \(4, 6\) here"):
            healed.recv_checkpoint(0, healed.metadata(), 1, PATIENCE)
        del own["user"]["w"]
        for receiver in (healed, transport):
            with pytest.raises(LoadFailed, match=r"state\['user'\]\['w'\] is the shard of a DTensor.*state_dict="):
                receiver.recv_checkpoint(0, healed.metadata(), 1, PATIENCE)
        healed.shutdown()
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_has_no_state_yet(tmp_path: Path) -> None:
    """FSDP2: a new replica's moments are no plain tensors, on which steps would fail later."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = fully_shard(nn.Linear(8, 6), mesh=DeviceMesh("cpu", [0]))
        optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        sender = DSQTransport[Any](PATIENCE, state_dict=optimizer.state_dict, directory=tmp_path)
        sender.send_checkpoint([1], 1, optimizer.state_dict(), PATIENCE)
        for state_dict, error in (
            (fresh.state_dict, "no DTensor is there.*get_optimizer_state_dict"), (optimizer.state_dict, None),
        ):
            receiver = DSQTransport[Any](PATIENCE, state_dict=state_dict, directory=tmp_path)
            if error is None:
                received = receiver.recv_checkpoint(0, sender.metadata(), 1, PATIENCE)
                assert isinstance(received["state"][0]["exp_avg"], DTensor)
            else:
                with pytest.raises(LoadFailed, match=error):
                    receiver.recv_checkpoint(0, sender.metadata(), 1, PATIENCE)
            receiver.shutdown()
        sender.shutdown()
    finally:
        dist.destroy_process_group()


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeout is 60, expected a datetime\.timedelta"):
        DSQTransport(60)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state_dict is of class dict, expected a function"):
        DSQTransport(state_dict={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout is 0:00:00, expected more than 0"):
        DSQTransport(timedelta(0))
    with pytest.raises(ConfigError, match="absent', which is no directory: create it first"):
        DSQTransport(directory=tmp_path / "absent")


def test_a_full_disk_of_the_receiver(transport: DSQTransport[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not said to be the sender's fault."""
    transport.send_checkpoint([1], 1, small(), PATIENCE)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for what in ("_read_blocks", "tempfile.TemporaryDirectory"):
        with monkeypatch.context() as patched:
            patched.setattr(f"dsq_ckpt.integrations.torchft.{what}", full)
            with pytest.raises(LoadFailed, match=r"step 1 from .*No space left.*; free space here, or name another"):
                transport.recv_checkpoint(0, transport.metadata(), 1, PATIENCE)


def test_after_its_end(tmp_path: Path) -> None:
    """A state is not kept that nobody can fetch."""
    transport = DSQTransport[Any](directory=tmp_path)
    transport.shutdown()
    with pytest.raises(SaveFailed, match="the state of step 1 is not sent, as the DSQTransport was shut down"):
        transport.send_checkpoint([1], 1, small(), PATIENCE)
    assert os.listdir(tmp_path) == []


def test_a_connection_that_is_reset(transport: DSQTransport[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """As by a port scan: no traceback on stderr, and the next one is served."""
    state = small()
    transport.send_checkpoint([1], 1, state, PATIENCE)
    with socket.create_connection(("localhost", int(transport.metadata().split(":")[2].split("/")[0]))) as scan:
        scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        scan.sendall(b"GET")
    same(transport.recv_checkpoint(0, transport.metadata(), 1, PATIENCE), state)
    transport.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_the_example_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lighthouse, as a replica of one process."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torchft.md").read_text(), re.S)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "RANK": "0", "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {"state_dict": small, "load_state_dict": lambda state: None}
    exec(block, given)
    given["manager"].shutdown()
    lighthouse.shutdown()
