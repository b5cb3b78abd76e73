"""Logs whose files say something else, with checksums that fit: an error names the file, and nothing is changed."""

from __future__ import annotations

import copy
import json
import re
import struct
from types import SimpleNamespace

import pytest
import xxhash
from torch.optim import SGD

from dsq_ckpt.distributed.comm import communicator
from dsq_ckpt.errors import DSQError, SaveFailed
from dsq_ckpt.lowdiff import recover, segments, snapshots
from tests.helpers.mutated_checkpoints import frame
from tests.lowdiff.loops import ADAM, SCHEDULED, Case, Loop, differences, recorded

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")


def forge(run, step, change):
    """Change what the segment of a step says of it."""
    (path,) = (path for name, path in segments.list_segments(run) if name.first <= step <= name.last)
    data = path.read_bytes()
    contents = segments.ContainerReader(path).contents
    change(next(entry for entry in contents["steps"] if entry["step"] == step))
    (start,) = struct.unpack("<Q", data[-32:-24])
    packed = frame(contents)
    path.write_bytes(data[:start] + packed + struct.pack(
        "<QQQ8s", start, len(packed), xxhash.xxh3_64_intdigest(packed), data[-8:]
    ))
    return path


FORGERIES = {
    "a hyperparameter that the optimizer does not take": lambda step: step["hyper"][0].update(betas=5),
    "too few groups": lambda step: step["hyper"].clear(),
    "plain data of no kind": lambda step: step["hyper"][0].update(lr={"$nothing": 1}),
    "states of others": lambda step: step["after"]["states"].update(other={}),
    "a state that its owner does not take": lambda step: step["after"]["states"].update(scheduler=[3]),
    "a buffer that is none": lambda step: step["buffers"].append(["nowhere", "float32", [1 << 40], 0]),
    "no hyperparameters": lambda step: step.pop("hyper"),
    "nothing left": lambda step: step.update(after=None),
    "gradients of another shape": lambda step: step["grads"][0].update(params=[0]),
    "a scale": lambda step: step["grads"][0].update({"as": "half", "stored": "float16", "scale": "x"}),
    "levels": lambda step: step["grads"][0].update({"as": "palette", "levels": 0, "count": 1 << 40, "codes": 0}),
}


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_nothing_is_changed_or_it_ends_before(tmp_path, change, merge):
    case = Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9), schedule=SCHEDULED.schedule) if merge else SCHEDULED
    table = recorded(case, tmp_path, 4, compressor="none")
    path = forge(tmp_path, 3, change)
    loop = Loop(case, seed=5)
    loop.step(0)
    before = copy.deepcopy(loop.state())
    try:
        recovery = recover(tmp_path, loop.model, loop.optimizer, state=loop.states, merge=merge)
    except DSQError as error:
        assert str(tmp_path) in str(error) and not isinstance(error, SaveFailed)
        assert differences(loop.state(), before) == []
        return
    if recovery.step == 4:  # what a later step sets as well, or the optimizer of this case does not read
        return
    assert recovery.step == 2 and path.name in recovery.ended
    if not merge:
        assert differences(loop.state(), table[2]) == []


@pytest.mark.parametrize("change", ["states of others", "a state that its owner does not take"])
def test_a_forged_last_state_is_refused(tmp_path, change):
    """It is looked at when the replay is done."""
    recorded(SCHEDULED, tmp_path, 2, compressor="none")
    path = forge(tmp_path, 2, FORGERIES[change])
    loop = Loop(SCHEDULED, seed=5)
    before = copy.deepcopy(loop.state())
    with pytest.raises(DSQError, match=re.escape(f"'{path}', step 2: ")):
        loop.recover(tmp_path)
    assert differences(loop.state(), before) == []


@pytest.mark.parametrize("change", [
    {"state_keys": {"0.weight": ["step", "nothing"]}}, {"entries": [["0.weight"]]}, {"step": [0]},
    {"session": ["a"]}, {"session": None}, {"session": "float32"},
    {"states": {"scheduler": 3}}, {"hyper": [[]]}, {"plain": {"0.weight": 3}},
], ids=str)
def test_a_snapshot_names_itself(tmp_path, change):
    """What it says of the log is not what a log says."""
    recorded(SCHEDULED, tmp_path, 2, compressor="none", snapshot_every=2, keep=1)
    (path,) = tmp_path.glob("step-*")
    with snapshots.Snapshot(path) as snapshot:
        snapshot_tensors = [snapshots.SnapshotTensor(tuple(keys), snapshot.tensor(name))
                  for name, keys in snapshot._checkpoint.index["planner"].items() if tuple(keys) != snapshots.META]
        meta = {**snapshot.meta, **change}
    snapshots.save_snapshot(tmp_path, 2, snapshot_tensors, meta, snapshots.snapshot_config("exact"), communicator(None))
    loop = Loop(SCHEDULED, seed=5)
    before = copy.deepcopy(loop.state())
    with pytest.raises(DSQError, match=re.escape(f"'{path}")):
        loop.recover(tmp_path)
    assert differences(loop.state(), before) == []


def test_a_snapshot_that_is_nested_too_deep_names_itself(tmp_path, monkeypatch):
    deep = SimpleNamespace(dumps=lambda *_, **__: '{"version":' + "[" * 100_000 + "]" * 100_000 + "}")
    monkeypatch.setattr(snapshots, "json", deep)
    recorded(SCHEDULED, tmp_path, 2, compressor="none", snapshot_every=2, keep=1)
    with pytest.raises(DSQError, match=rf"'{re.escape(str(tmp_path))}/step-.*nested too deep"):
        Loop(SCHEDULED, seed=5).recover(tmp_path)


def test_the_last_segment_of_a_closed_log(tmp_path):
    """That it is gone is noticed, though nothing follows it."""
    recorded(ADAM, tmp_path, 4, compressor="none", batch=1)
    *_, (_, path) = segments.list_segments(tmp_path)
    held = path.read_bytes()
    path.unlink()
    loop = Loop(ADAM, seed=5)
    recovery = loop.recover(tmp_path)
    assert (recovery.step, recovery.closed) == (3, True)
    assert "step 4 is missing, although step 4 was logged before the log was closed" in recovery.ended
    (note,) = (tmp_path / segments.LOG).glob("*.closed")
    assert json.loads(note.read_text()) == {"last": 4}
    path.write_bytes(held)
    note.write_text("")  # as older versions closed a log
    recovery = Loop(ADAM, seed=6).recover(tmp_path)
    assert (recovery.step, recovery.closed, recovery.ended) == (4, True, None)
    note.write_text('{"last": []}')
    assert note.name in Loop(ADAM, seed=7).recover(tmp_path).ended
