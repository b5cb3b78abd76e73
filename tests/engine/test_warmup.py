"""Kernels compiled ahead: what `dsq warmup` leaves, what is said, forks while it happens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from multiprocessing import connection
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator

from dsq_ckpt import native
from dsq_ckpt.engine import warmup
from dsq_ckpt.kernels import jit
from tests.helpers import processes

SAVE = """
import sys, warnings
import torch
import dsq_ckpt
from dsq_ckpt.kernels import jit; from dsq_ckpt.engine import warmup

def state(number):
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)) * 0.02
    weight = weight + 1e-4 * number * torch.randn(300, 1000, generator=torch.Generator().manual_seed(number))
    weight[0, 0] = 1000.0
    moments = {"exp_avg": weight * 1e-3, "exp_avg_sq": (weight * 1e-3) ** 2, "step": torch.tensor(1.0)}
    return {"model": {"w.weight": weight, "h.weight": weight[:100].bfloat16(), "b": torch.zeros(9)},
            "optimizer": {"state": {"w.weight": moments}}}

def use(run, config=None):
    for number in range(3):
        dsq_ckpt.save(state(number), f"{run}/{number}", config=config)
    for refinement in (False, "auto"):
        dsq_ckpt.load(state(0), f"{run}/2", refinement=refinement)
"""
USE_ALL = SAVE + """
from dsq_ckpt import native

def compiled():
    return {(kernel.py_func.__qualname__, signature) for kernel in jit.dispatchers() for signature in kernel.signatures}

native.force(sys.argv[2])
for group in warmup.ALL:
    assert warmup.compile_group(group) == []
ahead, count = compiled(), jit.count_compilations()
for system in ("dsq", "inshrinkerator", "adaptive", "lc"):
    use(f"{sys.argv[1]}/{system}", {"system": system})
print("MISSED", compiled() - ahead, jit.count_compilations() - count)
"""


IN_NUMBA = """
import os; os.environ["DSQ_CODER"] = "numba"  # so that there is something to compile
"""
FEW = IN_NUMBA + """
from dsq_ckpt.engine import warmup
warmup._TASKS = {group: tasks[-4:] for group, tasks in warmup._TASKS.items()}  # what takes half a second or so
"""


def python(text, *arguments, forked=False):
    status, output = processes.run(["-c", text, *map(str, arguments)], forked=forked)
    assert status == 0, output[-6000:]
    return output


SERVER = """
import gc, json, os, sys
import numba, pydantic.dataclasses, torch, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, typer
from tests.helpers import fork_server
numba.njit("int64(int64)")(lambda number: number + 1)  # so that it has loaded what each compilation needs
sys.path[0] = ""
assert "dsq_ckpt" not in sys.modules and len(os.listdir("/proc/self/task")) == 1
gc.collect()
gc.freeze()  # or the collector of each fork would walk over, and so copy, all that is here: more than a second
for line in sys.stdin:
    arguments, caches, output = json.loads(line)
    child = os.fork()
    if not child:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ["NUMBA_CACHE_DIR"] = caches
        numba.config.reload_config()
        text, *sys.argv[1:] = arguments
        fork_server.run(lambda: exec(text, {"__name__": "__main__"}))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """A process that forks: it has imported what takes seconds, but nothing of this package, nor has it compiled."""
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=processes.ROOT,
        env=processes.make_environment({}), start_new_session=True,
    )
    yield process
    process.communicate()


@pytest.fixture
def fresh(server, tmp_path):
    """Runs text in a process that is new to this package, with a directory for caches; returns its output."""
    def run(text, *arguments, caches):
        assert server.poll() is None, "it was killed after a test before this one"
        output = tmp_path / "output"
        output.unlink(missing_ok=True)
        server.stdin.write(json.dumps([[text, *map(str, arguments)], str(caches), str(output)]) + "\n")
        server.stdin.flush()
        if not connection.wait([server.stdout], processes.PATIENCE):
            processes.kill(server)
        status = server.stdout.readline()
        assert status == "0\n", f"{status}{output.read_text()[-6000:]}"
        return output.read_text()

    return run


@pytest.fixture
def warmed(fresh, tmp_path):
    """A directory for caches, with all that is kept for this checkout: kernels of saves and loads, and others."""
    text = IN_NUMBA + "from dsq_ckpt.engine import warmup\nfor group in ('save', 'load'): warmup.compile_group(group)"
    fresh(text, caches=os.environ.get("NUMBA_CACHE_DIR", ""))
    caches = tmp_path / "caches"
    places = {
        kernel.stats.cache_path: _CacheLocator.get_suitable_cache_subpath(kernel.py_func.__code__.co_filename)
        for kernel in jit.dispatchers()
    }
    for directory, below in places.items():
        (caches / below).mkdir(parents=True)
        for file in Path(directory).glob("*.nb[ci]"):
            shutil.copy(file, caches / below)
    return caches


COMMAND = FEW + """
from tests.helpers.commands import dsq_json
told = dsq_json("warmup")
print("TOLD", told["compiled"], told["seconds"] > 0, told["bytes"] > 0, *told["directories"])
"""


@pytest.mark.slow
def test_the_command_leaves_what_it_compiles(fresh, tmp_path):
    """Kernels of every group, in files; those are not compiled again."""
    first, second = (fresh(COMMAND, caches=tmp_path).split("TOLD ")[1].split() for _ in range(2))
    assert int(first[0]) > 15 and second[0] == "0", "the second time nothing is compiled"
    assert first[1:3] == ["True", "True"] and first[1:] == second[1:]
    assert first[3:] and all(path.startswith(str(tmp_path)) for path in first[3:])
    for kernel in ("to_bf16", "from_bf16", "importance"):
        assert list(tmp_path.rglob(f"*{kernel}-*.nbi")), f"{kernel}: of one group"


@pytest.mark.slow
@pytest.mark.parametrize("path", dict.fromkeys(("numba", native.available()[-1])))
def test_saves_and_loads_need_no_more_than_is_compiled_ahead(tmp_path, path):
    assert "MISSED set() 0\n" in python(USE_ALL, tmp_path, path, forked=True)


ONE_SAVE = FEW + SAVE + """
import time
warmup._TASKS["save"].append(lambda: time.sleep(2))  # more than it waits without a word
dsq_ckpt.save(state(0), sys.argv[1])
"""


@pytest.mark.slow
def test_the_first_save_says_that_it_compiles(fresh, warmed, tmp_path):
    """Before it does, on stderr; nothing when all is compiled."""
    line = "dsq_ckpt compiles its kernels, once on this machine; this takes about "
    line += "20 s (`dsq warmup` does it ahead)"
    for index in warmed.rglob("*._to_bf16-*.nbi"):
        index.unlink()
    assert line in fresh(ONE_SAVE, tmp_path / "a", caches=warmed).splitlines()
    assert "compiles" not in fresh(ONE_SAVE, tmp_path / "b", caches=warmed)


def test_where_logging_is_set_up_the_log_says_so(caplog, capfd, no_launcher):
    with caplog.at_level("INFO", "dsq_ckpt"):
        warmup._log_wait()
        no_launcher.setenv("RANK", "1")
        warmup._log_wait()  # rank 0 does
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.message.startswith("dsq_ckpt compiles its kernels, once on")
    assert capfd.readouterr() == ("", "")


FORKS = FEW + """
import os, threading, time
import torch
import dsq_ckpt
from dsq_ckpt import kernels; from dsq_ckpt.kernels import jit; from dsq_ckpt.engine import warmup
import numpy as np

dsq_ckpt.DSQStorageWriter("unused")
ended = 0
while not {"save", "load"} <= warmup._background.done or not ended:
    child = os.fork()
    if not child:
        kernels.pack(np.zeros(8, np.uint8), 2)  # Numba's locks are free
        warmup.wait("save") if ended == 3 else None  # without the thread of the parent
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ended += 1
print("FORKED", ended > 0)
"""


@pytest.mark.slow
def test_forks_while_kernels_are_compiled(fresh, tmp_path):
    assert "FORKED True" in fresh(FORKS, caches=tmp_path)


SHARED = FEW + """
import os, sys
from pathlib import Path
from dsq_ckpt.kernels import jit

def compiling(meet):  # in a fork, which starts with the others and says how much it compiled
    told, tell = os.pipe()
    if not os.fork():
        meet()
        warmup.compile_group("load")
        os.write(tell, b"%d" % jit.count_compilations())
        os._exit(0)
    os.close(tell)
    return told

def count(told):
    return int(os.read(told, 9))

alone = count(compiling(lambda: None))
for file in Path(sys.argv[1]).rglob("*"):  # not directories: Numba makes them at import, and the lock is in one
    file.is_dir() or file.unlink()
ready, go = os.pipe(), os.pipe()

def meet():
    os.write(ready[1], b"1")
    os.read(go[0], 1)

two = [compiling(meet) for _ in range(2)]
for _ in two:
    os.read(ready[0], 1)
os.write(go[1], b"12")
print("COMPILED", *map(count, two), alone)
"""


@pytest.mark.slow
def test_processes_of_a_host_share_the_work(fresh, tmp_path):
    caches = tmp_path / "caches"
    caches.mkdir()
    *counts, alone = map(int, fresh(SHARED, caches, caches=caches).split("COMPILED")[1].split())
    assert sum(counts) < 1.5 * alone, counts  # a few small ones are inlined in several


NUMBERS = """
from contextlib import nullcontext
from dsq_ckpt.engine import warmup

asked = []
warmup._try_lock = lambda number: nullcontext(asked.append(number) or False)  # another process compiles it
warmup.compile_group("more", lambda: len(asked) == len(warmup._TASKS["more"]))
print("ASKED", asked)
"""


def test_locks_are_the_same_with_the_compiled_library_and_without(fresh, tmp_path):
    choices = ("os.environ.pop('DSQ_CODER', None)", "os.environ['DSQ_CODER'] = 'numba'")
    numbers, others = (fresh(f"import os; {choice}\n{NUMBERS}", caches=tmp_path) for choice in choices)
    assert numbers == others and "ASKED [" in numbers


@pytest.mark.slow
def test_a_cache_that_an_image_was_built_with_is_taken_over(fresh, warmed, tmp_path):
    """From beside the package, where its user may not write, to where they may."""
    site, own = tmp_path / "site" / "dsq_ckpt", tmp_path / "own"
    shutil.copytree(processes.ROOT / "dsq_ckpt", site, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(processes.ROOT / "configs", site / "configs")
    for directory in warmed.iterdir():  # as `dsq warmup` there would have left it
        name = directory.name.rsplit("_", 1)[0]
        [inside] = (package for package in (site, *site.rglob("*")) if package.name == name and package.is_dir())
        for file in directory.glob("*.nb[ci]"):
            (inside / "__pycache__").mkdir(exist_ok=True)
            shutil.copy(file, inside / "__pycache__")
    output = fresh(
        IN_NUMBA + "os.access = lambda path, mode: False\n"  # as a file system that is read-only, even for root
        f"import sys\nsys.path.insert(0, {str(site.parent)!r})\n"
        + SAVE + "use(sys.argv[1])\n"
        "print('COMPILED', jit.count_compilations(), jit.cache_directories(), dsq_ckpt.__file__)",
        tmp_path / "run", caches=own,
    )
    assert "COMPILED 0 " in output and str(own) in output and str(site) in output


@pytest.mark.slow
def test_without_a_directory_for_caches(fresh):
    """Kernels are compiled and run; the line says what to set."""
    text = FEW + (
        "import time; from dsq_ckpt.kernels import jit\n"
        "warmup._TASKS['save'].append(lambda: time.sleep(2))\n"
        "warmup.wait('save')\n"
        "print('COMPILED', jit.count_compilations() > 0, jit.cache_directories())\n"
    )
    blocked = (  # by which Numba finds out where it may write; as root there is no such place
        "import tempfile, numba.core.caching\n"
        "def refuse(dir): raise PermissionError(dir)\n"
        "tempfile.TemporaryFile = refuse\n"
    )
    output = fresh(blocked + text, caches="")
    assert "in every process, as no directory for caches can be written (set NUMBA_CACHE_DIR)" in output
    assert "COMPILED True []" in output


def test_help_and_log_do_without_torch_and_numba(trained):
    run = trained[0]
    for arguments in (["--help"], ["log", str(run)], ["--version"]):
        text = (
            "import sys\nfrom dsq_ckpt.cli import app\n"
            f"app({arguments!r}, standalone_mode=False)\n"
            "print('HEAVY', sorted({'torch', 'numba'} & set(sys.modules)))"
        )
        assert "HEAVY []" in python(text), arguments


def test_python_m_and_completion():
    shown = subprocess.run(
        [sys.executable, "-m", "dsq_ckpt", "--help"], capture_output=True, text=True, check=True, cwd=processes.ROOT,
    ).stdout
    assert "--install-completion" in shown and "warmup" in shown


def test_registries_are_loaded_once_and_a_failure_is_left_to_the_thread(monkeypatch):
    loaded, asked = [], []

    def fails():
        loaded.append(threading.current_thread() is threading.main_thread())
        raise RuntimeError("of Numba")

    monkeypatch.setattr(warmup.native, "path", lambda: "numba")
    monkeypatch.setattr(warmup.jit, "load_registries", fails)
    monkeypatch.setattr(warmup, "_background", warmup._Background())
    monkeypatch.setattr(warmup._background, "enqueue", asked.append)
    warmup.start()
    warmup.start()
    assert loaded == [True] and asked == [("save", "load")] * 2


def no_more(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_compile_thread_that_died(monkeypatch):
    """Nor for one that could not be started; the next request starts another."""
    died, begun = threading.Event(), []

    def fails(group, stopped):
        begun.append(group)
        if len(begun) == 1:
            died.wait(60)
            raise SystemExit("as where memory ran out")

    monkeypatch.setattr(warmup.native, "path", lambda: "numba")
    monkeypatch.setattr(warmup, "compile_group", fails)
    monkeypatch.setattr(warmup, "_background", warmup._Background())
    warmup.start()
    waiters = [threading.Thread(target=warmup.wait, args=(group,), daemon=True) for group in ("load", "save")]
    for waiter in waiters:
        waiter.start()
    died.set()
    for waiter in waiters:
        waiter.join(60)
        assert not waiter.is_alive()
    monkeypatch.setattr(warmup, "_background", warmup._Background())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        warmup.wait("more")
    warmup.wait("more")
    assert begun[-1] == "more"
