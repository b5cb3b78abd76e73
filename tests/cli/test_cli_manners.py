"""`dsq`: progress, exit statuses, one-line errors, and `dsq watch`."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app, output
from dsq_ckpt.storage import checkpoint_copy
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, run_dsq
from tests.helpers.processes import PATIENCE, ROOT
from tests.helpers.small_run import NAMES


def on_a_terminal(*arguments):
    """Run a command whose stderr is taken for a terminal."""
    environment = {"FORCE_COLOR": "1", "COLUMNS": "100"}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def test_progress_on_a_terminal_alone_and_never_with_json(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(output, "_PROGRESS_DELAY", 0.0)
    start = output.Progress.start
    monkeypatch.setattr(output.Progress, "start", lambda self: (shown.append(self.tasks[0].description), start(self)))

    class Prompt(threading.Timer):
        """A timer that is done before what it is for goes on: its thread may be late, and is cancelled then."""

        def start(self):
            super().start()
            self.join()

    monkeypatch.setattr(output, "threading", SimpleNamespace(Timer=Prompt))
    torch.save({"w": torch.randn(64, 80)}, tmp_path / "plain.pt")
    commands = [
        ("log", run), ("report", run, "-o", tmp_path / "page.html"), ("verify", run), ("gc", run),
        ("export", run / NAMES[2], tmp_path / "out.pt"), ("cp", run, tmp_path / "copy"),
        ("compress", tmp_path / "plain.pt", tmp_path / "compressed"), ("rm", run / NAMES[0]),
        ("bench", "--stall", "--parameters", 100_000, "--repeats", 1, "--dir", tmp_path),
    ]
    for number in range(len(commands)):
        assert on_a_terminal(*commands[number]).exit_code == 0, commands[number]
    assert shown == [
        "reading the run", "reading the run", "checksums", "decoding", "looking for garbage", "export to torch",
        "copying", "compressing", "removing", "measuring",
    ]
    shown.clear()
    shutil.rmtree(tmp_path / "copy")
    again = [(*command, "--json") for command in commands[:4] + commands[5:6]]
    for command in again:
        assert on_a_terminal(*command).stderr == ""
        run_dsq(*command[:-1]) if command[0] != "cp" else None
    assert shown == [], "neither with --json nor where stderr is no terminal"


def test_statuses(run, monkeypatch):
    assert run_dsq("verify", run).exit_code == 0
    for arguments in (("verify",), ("nothing",), ("gc", run, "--older-than", "soon")):
        assert run_dsq(*arguments).exit_code == 2
    assert run_dsq("log", run / "nowhere").exit_code == 1
    (next((run / NAMES[0]).glob("*.dsq"))).unlink()
    assert run_dsq("verify", run).exit_code == 1

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_copy, "copy_checkpoints", interrupted)
    result = run_dsq("cp", run, run.parent / "copy")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert dsq_stdout("--version") == f"dsq_ckpt {dsq_ckpt.__version__}\n"


@pytest.mark.parametrize("command", [
    ("log",), ("watch", "--once"), ("report", "-o", "page.html"), ("inspect",), ("verify",), ("export", "out.pt"),
    ("compress", "out"), ("merge", "out"), ("gc",), ("rm",), ("cp", "out"),
], ids=lambda command: command[0])
@pytest.mark.parametrize("kind", ["missing", "file", "empty", "unknown"])
def test_bad_input_is_one_line(tmp_path, monkeypatch, command, kind):
    """The error names the input; nothing is made, and no traceback is shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(os.urandom(3000))
    (tmp_path / "empty").mkdir()
    name, *rest = command
    source = "unknown://bucket/run" if kind == "unknown" else kind
    if kind == "empty" and name in ("gc", "cp"):
        assert {"gc": "nothing to delete", "cp": "0 checkpoint(s)"}[name] in dsq_stdout(name, "empty", *rest)
        return
    text = dsq_error(name, source, *rest)
    assert source in text and len(text) < 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_configuration_that_is_no_text(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    (tmp_path / "junk").write_bytes(b"\x83" * 9)
    text = dsq_error("compress", tmp_path / "plain.pt", tmp_path / "out", "--config", f"{tmp_path}/junk")
    assert f"'{tmp_path}/junk' is no text; name a JSON or YAML file" in text


def test_watch_once(trained, tmp_path):
    lines = dsq_stdout("watch", trained[0], "--once").splitlines()
    assert [line.partition(":")[0] for line in lines] == list(NAMES)
    assert re.fullmatch(rf"{NAMES[0]}: [\d.]+ KiB, [\d.]+x, keyframe, [\d.]+ s", lines[0])
    url = f"memory://{uuid.uuid4().hex}"
    dsq_ckpt.save({"w": torch.randn(64, 80)}, f"{url}/step-1")
    assert dsq_stdout("watch", url, "--once").startswith("step-1: ")
    assert "is no run" in dsq_error("watch", trained[0] / NAMES[0])


@pytest.fixture
def watching():
    """Start `dsq watch`; returns its process."""
    started = []

    def start(*arguments, stdout):
        command = [sys.executable, "-m", "dsq_ckpt", "watch", *map(str, arguments), "--interval", "0.2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "20"}
        started.append(subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=environment,
            start_new_session=True,
        ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_watch_prints_lines_as_checkpoints_come_and_go(run, tmp_path, watching):
    new = tmp_path / "new"
    process = watching(new, stdout=subprocess.PIPE)  # it is not there yet
    assert process.stdout is not None and process.stderr is not None
    for name in NAMES:
        new.mkdir(exist_ok=True)
        shutil.copytree(run / name, new / f".{name}.dsq-00000000.tmp")
        (new / f".{name}.dsq-00000000.tmp").rename(new / name)
        assert process.stdout.readline().decode().startswith(f"{name}: ")
    shutil.rmtree(new / NAMES[0])
    (tmp_path / "wrong").write_text("{}")
    (tmp_path / "wrong").replace(new / NAMES[1] / "manifest.json")  # never empty, which is another problem
    assert f"problem: {NAMES[1]}: " in process.stderr.readline().decode()
    shutil.copytree(run / NAMES[0], new / ".step-again.dsq-00000000.tmp")
    (new / ".step-again.dsq-00000000.tmp").rename(new / "step-again")
    assert process.stdout.readline().decode().startswith("step-again: ")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert process.stdout.read() == process.stderr.read() == b""


def test_watch_on_a_terminal(run, tmp_path, watching):
    (tmp_path / "new").mkdir()
    parent_end, child_end = pty.openpty()
    process = watching(tmp_path / "new", stdout=child_end)
    os.close(child_end)
    seen = b""

    def until(text):
        nonlocal seen
        deadline = time.monotonic() + PATIENCE
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([parent_end], [], [], 1.0)[0]:
                seen += os.read(parent_end, 65536)

    until(b"waiting for the first checkpoint")
    for name in NAMES:
        shutil.copytree(run / name, tmp_path / "new" / name)
    until(b"3 checkpoints: ")
    assert all(name.encode() in seen for name in NAMES)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # Linux: the other end was closed
        while os.read(parent_end, 65536):
            pass
    assert process.wait(PATIENCE) == 0
    os.close(parent_end)


@pytest.mark.parametrize("last, said", [("nope", "nope' does not exist"), (NAMES[0], "is named twice")])
def test_rm_removes_nothing_if_one_cannot_be_removed(run, last, said):
    assert said in dsq_error("rm", run / NAMES[0], run / last)
    assert (run / NAMES[0] / "manifest.json").exists()


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_rm_says_that_no_refinement_is_left(tmp_path, json):
    """Each checkpoint that is left could be resumed from, before the removed one was saved."""
    state = {"w": torch.randn(80, 80)}
    for name in NAMES:
        dsq_ckpt.save(state, tmp_path / name, config={"refinement": {"keep_last": 1}})
    assert "no checkpoint with a refinement" not in run_dsq("rm", tmp_path / NAMES[0], *json).stdout
    text = run_dsq("rm", "--dry-run", tmp_path / NAMES[2]).stdout
    assert f"'{tmp_path}' would have no checkpoint with a refinement layer any more" in text
    result = run_dsq("rm", tmp_path / NAMES[2], *json)
    assert (f"'{tmp_path}' has no checkpoint with a refinement" in result.stdout) is not bool(json)
    assert result.exit_code == 0 and Manifest.read(tmp_path / NAMES[1]).refinement == "dropped"
    assert "no checkpoint with" not in run_dsq("rm", tmp_path / NAMES[1]).stdout, "nothing is left"


def test_rm_of_a_damaged_checkpoint_says_what_removes_it(run):
    (run / NAMES[1] / "manifest.json").write_text("garbage")
    assert f"if it is to go, delete the directory, '{run / NAMES[1]}'" in dsq_error("rm", run / NAMES[1])
    shutil.rmtree(run / NAMES[1])
    dsq_stdout("verify", run / NAMES[2])


@pytest.mark.parametrize("names, last", [(NAMES[:1], 1), (NAMES[:2], 2), (NAMES[1::-1], 1), (NAMES, 0)])
def test_rm_tells_the_space_that_is_free_then(trained, tmp_path, names, last):
    """A keyframe lies on a disk once, with a link in each checkpoint that is coded against it."""
    run = checkpoint_copy.copy_checkpoints(trained[0], tmp_path / "run").path  # with its links
    paths = [run / name for name in names]
    tried = dsq_json("rm", "--dry-run", *paths)
    before, manifests = on_disk(run), sum((path / "manifest.json").stat().st_size for path in paths)
    text = dsq_stdout("rm", "--dry-run", *paths)
    done = dsq_json("rm", *paths)
    assert sum(entry["bytes"] for entry in done) + manifests == before - on_disk(run)
    assert [{**entry, "dry_run": False} for entry in tried] == done
    linked = [len(entry["linked"]) for entry in done]
    told = re.findall(r"; the bytes of (\d+) file\(s\) stay, by links elsewhere", text)
    assert [int(count) for count in told] == [count for count in linked if count]
    assert linked[-1] == last


def on_disk(directory):
    """Return the bytes of the files in a directory, each once."""
    statuses = [path.lstat() for path in directory.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in statuses}.values())


def test_gc_tells_the_space_that_is_free_then(run):
    """Failed saves, and a copy under way, may have links to files of complete checkpoints, and of each other."""
    (keyframe,) = (run / NAMES[0]).glob("*.dsq")
    orphan = run / "failed" / "0123456789abcdef-00000.dsq"
    orphan.parent.mkdir()
    orphan.write_bytes(b"x" * 3072)
    names = ("failed", ".copy.dsq-01234567.tmp", "again")
    for name in names:
        (run / name).mkdir(exist_ok=True)
        os.link(keyframe, run / name / keyframe.name)
        if name != "failed":
            os.link(orphan, run / name / orphan.name)
    text = dsq_stdout("gc", run, "--older-than", "0s", "--dry-run")
    assert "would delete 5 file(s), 3.00 KiB; the bytes of 3 file(s) stay, by links elsewhere" in text
    report = dsq_json("gc", run, "--older-than", "0s")
    assert report["bytes"] == 3072 and len(report["files"]) == 5
    assert report["linked"] == sorted(str(run / name / keyframe.name) for name in names)
    assert sorted(os.listdir(run)) == sorted(NAMES) and keyframe.exists()
