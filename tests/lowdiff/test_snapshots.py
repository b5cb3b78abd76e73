"""Snapshots: what is in them, which are taken, and which go."""

from __future__ import annotations

import errno
import json
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adam

import dsq_ckpt
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, SaveFailed, UnsupportedFormat
from dsq_ckpt.lowdiff import GradientLog, Replica, recover, segments, snapshots
from dsq_ckpt.lowdiff.plain_data import to_plain
from dsq_ckpt.lowdiff.snapshots import Snapshot, SnapshotTensor
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from tests.helpers.new_process import begin_new_process
from tests.helpers.states import mixed_state, relative_error
from tests.lowdiff.loops import Case, Loop, bits, seeded

SESSION = "0123456789abcdef"


def tensors():
    state = mixed_state()
    by_name = {
        f"{part}.{name}": tensor.contiguous() for part in ("lossy", "small", "counts")
        for name, tensor in state[part].items() if "complex" not in name
    }
    by_name["small.odd"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return by_name


def write_snapshot(run, step, session=SESSION, base="exact", **meta):
    (run / segments.LOG).mkdir(exist_ok=True)
    entries = [SnapshotTensor(("model", name), tensor) for name, tensor in tensors().items()]
    snapshots.save_snapshot(
        run, step, entries, {"session": session, "step": step, **meta}, snapshots.snapshot_config(base), SingleProcess()
    )
    return snapshots.snapshot_directory(run, step)


def segment(run, session, first, last, rank=0):
    path = run / segments.LOG / str(segments.SegmentName(session, first, last, rank))
    path.touch()
    return path


def test_round_trip(tmp_path):
    path = write_snapshot(tmp_path, 12, hyper=[{"lr": {"$float": "inf"}}])
    assert path.name == "step-000000012" and Manifest.read(path).parent is None
    with Snapshot(path) as snapshot:
        assert snapshot.meta["step"] == 12 and snapshot.meta["hyper"] == [{"lr": {"$float": "inf"}}]
        assert not snapshot.lossy and list(snapshot.find_damage()) == []
        for name, tensor in tensors().items():
            loaded = snapshot.tensor(f"model.{name}")
            assert snapshot.shape(f"model.{name}") == (tuple(tensor.shape), tensor.dtype)
            assert loaded.dtype == tensor.dtype and bits(loaded) == bits(tensor), name
        with pytest.raises(CorruptCheckpoint, match=r"has no 'model\.nothing'"):
            snapshot.tensor("model.nothing")


def test_lossy(tmp_path):
    whole = write_snapshot(tmp_path, 1)
    small = write_snapshot(tmp_path, 2, base="dsq")
    with Snapshot(small) as snapshot:
        assert snapshot.lossy and snapshot.meta["step"] == 2
        assert bits(snapshot.tensor("model.counts.long")) == bits(tensors()["counts.long"])
    sizes = [sum(file.stat().st_size for file in path.glob("*.dsq")) for path in (whole, small)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("setting, least, most", [("ns_steps", 0.0, 0.0625), ("dampening", 0.1, 0.26)])
def test_lossy_momentum_of_optimizers_other_than_sgd_is_finer(tmp_path, setting, least, most):
    """The metadata of a snapshot has the settings by which they are known."""
    torch.manual_seed(0)
    own, meta = torch.randn(80, 70), {"session": SESSION, "step": 1, "hyper": [{"lr": 0.1, setting: 5}]}
    (tmp_path / segments.LOG).mkdir()
    snapshot_tensors = [SnapshotTensor(("optim", "state", "w.weight", "momentum_buffer"), own)]
    snapshots.save_snapshot(tmp_path, 1, snapshot_tensors, meta, snapshots.snapshot_config("dsq"), SingleProcess())
    with Snapshot(snapshots.snapshot_directory(tmp_path, 1)) as snapshot:
        error = snapshot.tensor("optim.state.w.weight.momentum_buffer") - own
    assert least < float(error.norm() / own.norm()) < most


@pytest.mark.parametrize("place", ["state", "group", None])
def test_lossy_first_moments_beside_a_basis_in_a_tuple_are_rounded(tmp_path, place):
    """The metadata has what an optimizer keeps that is no tensor, in its state and its groups."""
    torch.manual_seed(0)
    own, basis = torch.randn(80, 70), to_plain((torch.eye(70), 1), "basis")
    meta = {"session": SESSION, "step": 1, "hyper": [{"lr": 0.1, "betas": to_plain((0.9, 0.99), "betas")}],
            "plain": {"w.weight": {"k": 1}}}
    if place is not None:
        (meta["plain"]["w.weight"] if place == "state" else meta["hyper"][0])["basis"] = basis
    (tmp_path / segments.LOG).mkdir()
    snapshot_tensors = [SnapshotTensor(("optim", "state", "w.weight", name), value)
            for name, value in (("exp_avg", own), ("exp_avg_sq", own.square()))]
    snapshots.save_snapshot(tmp_path, 1, snapshot_tensors, meta, snapshots.snapshot_config("dsq"), SingleProcess())
    with Snapshot(snapshots.snapshot_directory(tmp_path, 1)) as snapshot:
        moment = snapshot.tensor("optim.state.w.weight.exp_avg")
    assert moment.equal(own.bfloat16().float()) == (place is not None)


def test_snapshots_may_be_lossy_or_exact():
    assert not snapshots.is_lossy(snapshots.snapshot_config("exact"))
    assert snapshots.is_lossy(snapshots.snapshot_config("dsq"))
    assert snapshots.is_lossy(snapshots.snapshot_config({"quantize": {"min_elements": 64}}))
    with pytest.raises(ConfigError):
        snapshots.snapshot_config("small")


def test_something_else(tmp_path, monkeypatch):
    path = tmp_path / "step-000000001"
    dsq_ckpt.save({"x": torch.ones(3)}, path)
    with pytest.raises(CheckpointNotFound, match="not a snapshot of a gradient log"):
        Snapshot(path)
    assert snapshots.read_metadata(path) is None and snapshots.read_metadata(tmp_path / "nowhere") is None
    monkeypatch.setattr(snapshots, "_VERSION", 2)
    newer = write_snapshot(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(UnsupportedFormat, match="log of version 2"):
        Snapshot(newer)


def test_order(tmp_path):
    """By age, also after a return to an older one; those whose manifest is damaged at the place of their step."""
    for step in (5, 10, 20, 15):
        write_snapshot(tmp_path, step)
    (tmp_path / "step-000000099").mkdir()
    (tmp_path / "other").mkdir()

    def order():
        return [int(path.name[5:]) for path, _ in snapshots.list_snapshots(tmp_path)]

    assert order() == [15, 20, 10, 5]
    (snapshots.snapshot_directory(tmp_path, 10) / MANIFEST).write_text(json.dumps({"format": "?"}))
    assert order() == [15, 20, 10, 5]
    assert [manifest is None for _, manifest in snapshots.list_snapshots(tmp_path)] == [False, False, True, False]


def test_order_where_clocks_go_back(tmp_path, monkeypatch):
    """Snapshots of a process that knows none before it are newer than those that are there; one is replaced."""
    now = time.time()
    write_snapshot(tmp_path, 5)
    write_snapshot(tmp_path, 20)
    for hours, step in enumerate((25, 25, 15), 1):
        begin_new_process()
        monkeypatch.setattr(time, "time", lambda earlier=now - 3600 * hours: earlier)
        path = write_snapshot(tmp_path, step, session=f"{hours:016x}")
        assert str(snapshots.list_snapshots(tmp_path)[0][0]) == dsq_ckpt.latest(tmp_path) == str(path)
    assert [int(path.name[5:]) for path, _ in snapshots.list_snapshots(tmp_path)] == [15, 25, 20, 5]
    assert list(snapshots.list_sessions(tmp_path)) == ["0" * 15 + "3", "0" * 15 + "2", SESSION]
    snapshots.remove_old_snapshots(tmp_path, 2)
    assert [int(path.name[5:]) for path, _ in snapshots.list_snapshots(tmp_path)] == [15, 25]


def test_a_run_that_cannot_be_looked_at_fails_the_save_on_all_ranks(tmp_path, monkeypatch):
    """As an error of the save, which all ranks are told of; ranks that write know no snapshot before it."""
    write_snapshot(tmp_path, 5)
    begin_new_process()
    monkeypatch.setattr(snapshots, "list_snapshots", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(SaveFailed, match="Input/output error"):
        write_snapshot(tmp_path, 10)
    assert not snapshots.snapshot_directory(tmp_path, 10).exists()


def test_retire(tmp_path):
    for step in (4, 8, 12):
        write_snapshot(tmp_path, step)
    old, across, new = (segment(tmp_path, SESSION, first, first + 2) for first in (5, 7, 9))
    before = segment(tmp_path, "f" * 16, 1, 3)
    snapshots.remove_old_snapshots(tmp_path, 3)
    assert old.exists() and not before.exists()
    snapshots.remove_old_snapshots(tmp_path, 2)
    assert [path.name for path, _ in snapshots.list_snapshots(tmp_path)] == ["step-000000012", "step-000000008"]
    assert not old.exists() and across.exists() and new.exists()
    snapshots.remove_old_snapshots(tmp_path, 1)
    assert not across.exists() and not new.exists() and not snapshots.snapshot_directory(tmp_path, 8).exists()


def test_retire_leaves_what_is_not_its_own(tmp_path):
    """Checkpoints of the engine beside it, pinned ones, and ones that cannot be read."""
    dsq_ckpt.save({"x": torch.ones(3)}, tmp_path / "step-000000001")
    damaged = write_snapshot(tmp_path, 2)
    (damaged / MANIFEST).write_text("{}")
    write_snapshot(tmp_path, 3)
    segment_path = segment(tmp_path, SESSION, 4, 6)
    snapshots.remove_old_snapshots(tmp_path, 1)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "2", "3"] and segment_path.exists()


def test_without_a_snapshot_nothing_goes(tmp_path):
    (tmp_path / segments.LOG).mkdir()
    segment_path = segment(tmp_path, SESSION, 1, 3)
    snapshots.remove_old_snapshots(tmp_path, 1)
    assert segment_path.exists()


def test_momentum_that_was_recovered_is_saved_as_it_is(tmp_path):
    """By processes that have loaded nothing themselves: neither do its errors add up, nor does it grow."""
    def make():
        model = nn.Linear(300, 200, bias=False)
        return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)

    model, optimizer = make()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        model.weight.grad = torch.randn(200, 300, generator=generator) * torch.logspace(-1, 1, 300)
        optimizer.step()
    first, errors = optimizer.state[model.weight]["momentum_buffer"].clone(), []
    for number in range(5):
        GradientLog(tmp_path / str(number), model, optimizer, base="dsq").close()
        model, optimizer = make()
        recover(tmp_path / str(number), model, optimizer)
        errors.append(relative_error(optimizer.state[model.weight]["momentum_buffer"], first))
    assert errors[-1] < 1.2 * errors[0] < 0.36, errors
    assert 0.9 < float(optimizer.state[model.weight]["momentum_buffer"].norm() / first.norm()) < 1.1


class BitLinear(nn.Linear):
    """A layer that rounds its weights to their signs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.weight + (self.weight.sign() - self.weight).detach()
        return nn.functional.linear(x, rounded * 0.1, self.bias)


class Mixed(nn.Module):
    """A trained layer, and tensors whose errors no later step repairs."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.frozen = nn.Linear(12, 400), nn.Linear(12, 400).requires_grad_(False)
        self.rounded = BitLinear(400, 12)
        self.points = nn.Parameter(torch.randn(400, 12))
        self.points.manifold = "Sphere"
        self.register_buffer("table", torch.randn(400, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rounded(self.plain(x) + self.frozen(x)) + (self.points * self.table).mean(0)


@pytest.mark.parametrize(("kind", "options"), [
    (GradientLog, {"compressor": "none", "snapshot_every": 3}), (Replica, {}),
])
@pytest.mark.usefixtures("in_thread", "one_thread")
def test_lossy_snapshots_know_the_model(tmp_path, kind, options):
    """Snapshots store exactly what a `Compressor` does; rounded weights were quantized."""
    case = Case(lambda m: Adam([p for p in m.parameters() if p.requires_grad], 0.01), lambda s: seeded(s, Mixed))
    loop = Loop(case)
    with kind(tmp_path, loop.model, loop.optimizer, base="dsq", **options) as log:
        for number in range(3):
            loop.step(number)
            log.step()
            log._require_client().wait("saved", 60)
    again = Loop(case, seed=1)
    recovered = again.recover(tmp_path)
    assert recovered.lossy and recovered.replayed == 0 and recovered.step == 3
    after = again.model.state_dict()
    changed = {name for name, tensor in loop.model.state_dict().items() if not torch.equal(tensor, after[name])}
    assert changed == {"plain.weight"}
