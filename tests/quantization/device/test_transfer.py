"""The way from a device to the host, on tensors of the CPU."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from dsq_ckpt.quantization.device import transfer


def test_bytes_that_wait_for_the_trip_are_bounded(monkeypatch):
    monkeypatch.setattr(transfer, "IN_FLIGHT", 100)
    lane = transfer.Transfer(torch.device("cpu"))
    go, order = threading.Event(), []
    lane.reserve(80)
    lane.submit(80, lambda: go.wait(600))
    second = threading.Thread(target=lambda: (lane.reserve(30), order.append("reserved")))
    second.start()
    second.join(0.2)
    assert order == [] and second.is_alive()
    go.set()
    second.join(120)
    assert order == ["reserved"]
    lane.submit(30, lambda: None).result()
    lane.reserve(1000)  # alone, a chunk may be larger


def test_a_transfer_at_the_interpreter_s_end_is_made_at_once():
    lane = transfer.Transfer(torch.device("cpu"))
    lane._thread.shutdown()
    lane.reserve(transfer.IN_FLIGHT)
    assert lane.submit(transfer.IN_FLIGHT, lambda: 5).result() == 5
    lane.reserve(transfer.IN_FLIGHT)  # they were given back


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_fetched_bytes_are_the_tensor_s(monkeypatch, size):
    monkeypatch.setattr(transfer, "SLOT", 1000)
    source = torch.from_numpy(np.frombuffer(os.urandom(4 * size), np.int32).copy())
    lane = transfer.Transfer(torch.device("cpu"))
    lane.reserve(1)
    assert lane.submit(1, lambda: lane.fetch(source)).result().tobytes() == source.numpy().tobytes()
