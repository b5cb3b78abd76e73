"""Segments: complete or absent, every byte checked, and only consecutive steps of all ranks can be replayed."""

from __future__ import annotations

import os
import random
import shutil

import pytest
import torch
import xxhash

from dsq_ckpt.errors import CorruptCheckpoint, DSQError, UnsupportedFormat
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.lowdiff.encoding import encode_dense, encode_sparse
from dsq_ckpt.lowdiff.segments import EncodedStep, LogSegment
from dsq_ckpt.lowdiff.train_state import ParameterEntry
from dsq_ckpt.storage.atomic_io import hidden_name
from dsq_ckpt.storage.container import ContainerWriter
from tests.lowdiff.loops import bits

SESSION = "0123456789abcdef"
ENTRIES = [
    ParameterEntry("a", (6, 7), "float32", 0, 0), ParameterEntry("b", (30,), "float32", 0, 0),
    ParameterEntry("c", (4,), "bfloat16", 1, 0),
]


def gradients(number):
    generator = torch.Generator().manual_seed(number)
    by_name = {entry.name: torch.randn(entry.elements, generator=generator) for entry in ENTRIES}
    by_name["b"][torch.rand(30, generator=generator) < 0.8] = 0
    by_name["c"] = by_name["c"].bfloat16()
    return by_name


def step_of(number):
    blocks = []

    def add(block):
        blocks.append(block)
        return len(blocks) - 1

    values = gradients(number)
    places = values["b"].nonzero().view(-1)
    raw = values["c"].view(torch.uint8).numpy().tobytes()
    grads = [
        {"params": [0], "dtype": "float32", **encode_dense(values["a"], (1.0,), None, None, add)},
        {"params": [1], "dtype": "float32", **encode_sparse(places, values["b"][places], add)},
        {"params": [2], "dtype": "bfloat16", **encode_dense(values["c"], (1.0,), None, None, add)},
    ]
    record = {"hyper": [{"lr": 0.1 * number}], "after": {"hyper": None, "states": {}}, "grads": grads,
             "buffers": [["mean", "bfloat16", [4], add(raw)]]}
    return EncodedStep(number, record, blocks)


def written(run, first, last, rank=0, ranks=1, session=SESSION):
    (run / segments.LOG).mkdir(exist_ok=True)
    steps = [step_of(number) for number in range(first, last + 1)]
    info = segments.write_segment(run, session, rank, ranks, ENTRIES, steps, False)
    return run / segments.LOG / info.name


def read_all(path):
    segment = LogSegment(path)
    try:
        return {number: (segment.gradients(number), segment.buffers(number)) for number in segment.steps}
    finally:
        segment.close()


def test_round_trip(tmp_path):
    path = written(tmp_path, 5, 8)
    segment = LogSegment(path)
    assert segment.entries == ENTRIES and list(segment.steps) == [5, 6, 7, 8]
    for number in (8, 5, 7):
        decoded, truth = segment.gradients(number), gradients(number)
        assert {name: bits(tensor) for name, tensor in decoded.items()} == {n: bits(t) for n, t in truth.items()}
        assert bits(segment.buffers(number)["mean"]) == bits(truth["c"])
        places = segment.sent_indices(number)
        assert set(places) == set(truth) and torch.equal(places["b"], truth["b"].nonzero().view(-1))
        assert all(places[name] is None for name in truth if name != "b")  # whole gradients were sent everywhere
    segment.close()
    segment.close()


def test_any_damaged_byte_is_found(tmp_path):
    path = written(tmp_path, 1, 2)
    data, seed = path.read_bytes(), random.randrange(2**32)
    print("seed", seed, "bytes", len(data))
    rng = random.Random(seed)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        if place == 8 and 1 <= damaged[8] < data[8]:
            continue  # the format version of the header became one that is read too; nothing else in the file tells it
        with pytest.raises((CorruptCheckpoint, UnsupportedFormat)):
            read_all(path)
    for size in {0, 1, 15, len(data) - 1, *(rng.randrange(len(data)) for _ in range(50))}:
        path.write_bytes(data[:size])
        with pytest.raises(CorruptCheckpoint):
            read_all(path)
    path.write_bytes(data)
    read_all(path)


@pytest.mark.parametrize("name", [
    f"{SESSION}-000000006-000000009-00000.grads", f"{SESSION}-000000005-000000007-00000.grads",
    f"{SESSION}-000000005-000000008-00001.grads", f"ffff{SESSION[4:]}-000000005-000000008-00000.grads",
])
def test_renamed(tmp_path, name):
    path = written(tmp_path, 5, 8)
    renamed = path.rename(path.with_name(name))
    with pytest.raises(CorruptCheckpoint, match="renamed"):
        LogSegment(renamed)


def test_a_newer_version(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_VERSION", 2)
    path = written(tmp_path, 1, 1)
    monkeypatch.undo()
    with pytest.raises(UnsupportedFormat, match="version 2, this dsq_ckpt reads up to 1; upgrade"):
        LogSegment(path)


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "log").mkdir()
    with ContainerWriter(tmp_path / "log", f"{SESSION}-000000001-000000001-00000.grads", False) as writer:
        writer.finish({"tensors": {}})
    with pytest.raises(CorruptCheckpoint, match="is no segment"):
        LogSegment(writer.path)


def replayable(run, after=0, last=None):
    log_steps = segments.replayable_steps(run, SESSION, after, last)
    return len(log_steps.segments), log_steps.ended


def test_course(tmp_path):
    assert replayable(tmp_path) == (0, None)
    for first, last in ((1, 3), (4, 4), (5, 9)):
        for rank in range(2):
            written(tmp_path, first, last, rank, 2)
    written(tmp_path, 1, 20, session="f" * 16)
    assert replayable(tmp_path) == (9, None)
    assert replayable(tmp_path, 4) == (5, None)
    assert replayable(tmp_path, 1, 6) == (5, None)
    assert replayable(tmp_path, 9) == (0, None)
    assert replayable(tmp_path, 30) == (0, None)
    assert [[segment.path.name[-7] for segment in step] for step in
            segments.replayable_steps(tmp_path, SESSION, 7).segments] == [["0", "1"]] * 2


def test_a_share_is_missing(tmp_path):
    written(tmp_path, 1, 3, 0, 2)
    written(tmp_path, 1, 2, 1, 2)
    written(tmp_path, 4, 6, 0, 2)
    steps, ended = replayable(tmp_path)
    assert steps == 2 and ended == "step 3 is not complete: the share of rank(s) 1 is missing"


def test_a_gap(tmp_path):
    for step in (1, 2, 5):
        written(tmp_path, step, step)
    assert replayable(tmp_path) == (2, "step 3 is missing, although step 5 is there")
    assert replayable(tmp_path, 2) == (0, "step 3 is missing, although step 5 is there")
    assert replayable(tmp_path, 0, 2) == (2, None)


def test_a_damaged_one(tmp_path):
    for step in (1, 2, 3):
        path = written(tmp_path, step, step)
    path.write_bytes(path.read_bytes()[:-1])
    steps, ended = replayable(tmp_path)
    assert steps == 2 and ended.startswith("step 3 cannot be read") and path.name in ended


def test_more_segments_than_open_files(tmp_path):
    resource = pytest.importorskip("resource")
    for step in range(1, 61):
        written(tmp_path, step, step)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limit[1]))
    try:
        assert replayable(tmp_path) == (60, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_superseded_segments_are_found(tmp_path):
    for first, last in ((1, 3), (4, 6), (7, 9)):
        written(tmp_path, first, last)
    other = written(tmp_path, 1, 2, session="f" * 16)
    (tmp_path / "log" / "notes.txt").write_text("not ours")

    def left(**kept):
        return sorted(path.name[17:36] for path in segments.find_superseded(tmp_path, kept) if path != other)

    assert left(**{SESSION: 0}) == []
    assert left(**{SESSION: 5}) == ["000000001-000000003"]
    assert left(**{SESSION: 6}) == ["000000001-000000003", "000000004-000000006"]
    assert other in segments.find_superseded(tmp_path, {SESSION: 6})


def test_leftovers(tmp_path, monkeypatch):
    """What a writer that was killed leaves; and nothing of one that failed."""
    path = written(tmp_path, 1, 1)
    torn, former = hidden_name(path), path.with_name(f".{path.name}.0a1b2c3d.tmp")
    shutil.copy(path, torn)
    shutil.copy(path, former)
    assert set(segments.find_temporary_files(tmp_path)) == {torn, former}
    assert [path for _, path in segments.list_segments(tmp_path)] == [path]
    monkeypatch.setattr(ContainerWriter, "finish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, 2, 2)
    assert sorted(os.listdir(tmp_path / "log")) == sorted([path.name, torn.name, former.name])


def test_blocks_are_read_once_more_after_damage(tmp_path):
    """A segment that opens whose data was altered: an error when the step is read, not other numbers."""
    path = written(tmp_path, 1, 3)
    segment = LogSegment(path)
    offset, size, checksum = segment.steps[2]["blocks"][0]
    data = bytearray(path.read_bytes())
    assert xxhash.xxh3_64_hexdigest(bytes(data[offset : offset + size])) == checksum
    data[offset] ^= 1
    path.write_bytes(data)
    segment = LogSegment(path)
    segment.gradients(1)
    with pytest.raises(DSQError, match="altered"):
        segment.gradients(2)
    segment.gradients(3)
    segment.close()


def test_a_name_claims_no_more_steps_than_there_can_be(tmp_path):
    """A name is not covered by any checksum, and who lists segments makes tables of the steps they claim."""
    path = written(tmp_path, 3, 4)
    (path.parent / path.name.replace("000000004", "9" * 40)).write_bytes(path.read_bytes())
    assert [name.last for name, _ in segments.list_segments(tmp_path)] == [4]
    log_steps = segments.replayable_steps(tmp_path, SESSION, 2)
    assert (len(log_steps.segments), log_steps.ended) == (2, None)


def test_more_ranks_than_there_can_be(tmp_path):
    """Those that are missing are told, but not all of them."""
    written(tmp_path, 1, 1, ranks=1 << 64)
    ended = segments.replayable_steps(tmp_path, SESSION, 0).ended
    assert ended is not None and "rank(s) 1, 2, 3, 4, 5, 6, 7, 8 and others is missing" in ended


def test_an_error_of_the_optimizer_about_hyperparameters_names_the_segment(tmp_path):
    path = written(tmp_path, 1, 1)
    with pytest.raises(CorruptCheckpoint, match=f"{path}.*step 1.*capturable"), LogSegment(path).translate_errors(1):
        raise AssertionError("If capturable=True, params must be on supported devices")
