"""Files that are written to the device as they grow have the bytes of any other file."""

from __future__ import annotations

import os
import sys

import pytest

from dsq_ckpt.storage import writeback


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("buffering", [-1, 1 << 20])
def test_bytes(tmp_path, monkeypatch, fsync, buffering):
    asked = []
    monkeypatch.setattr(writeback, "start_writeback", lambda _, offset, size: asked.append((offset, size)))
    pieces = [os.urandom(size) for size in (10, 3 << 20, 5, 2 << 20, 9 << 20, 0, 1 << 20, 7)]
    with writeback.open_new(tmp_path / "file", fsync, buffering) as stream:
        for piece in pieces:
            stream.write(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    offset = 0
    for start, size in asked:  # every byte once, up to the last step
        assert start == offset and size >= writeback._STEP
        offset += size
    assert len(asked) >= 2 if fsync else not asked
    assert not fsync or sum(map(len, pieces)) - offset < writeback._STEP
    with pytest.raises(FileExistsError):
        writeback.open_new(tmp_path / "file", fsync, buffering)


def test_names_and_errors_are_those_of_open(tmp_path):
    """They end in messages, in which a path is not `PosixPath(...)`."""
    seen = []
    for fsync in (False, True):
        with writeback.open_new(tmp_path / f"{fsync}", fsync, -1) as stream:
            assert stream.name == str(tmp_path / f"{fsync}") and stream.mode == "xb" and stream.seekable()
        for wrong in (tmp_path / "missing" / "file", tmp_path):
            with pytest.raises(OSError) as raised:
                writeback.open_new(wrong, fsync, -1)
            seen.append((str(raised.value), raised.value.filename))
    assert seen[:2] == seen[2:] and "PosixPath" not in str(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_the_system_is_asked(tmp_path):
    with open(tmp_path / "file", "wb") as stream:
        stream.write(bytes(1 << 20))
        stream.flush()
        assert writeback.start_writeback(stream.fileno(), 0, 1 << 20)
        assert not writeback.start_writeback(stream.fileno(), -1, 1 << 20)
    read, write = os.pipe()
    assert not writeback.start_writeback(write, 0, 10)
    os.close(read), os.close(write)
