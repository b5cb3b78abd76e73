"""A background save that the interpreter's exit finds still running."""

from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import forks, processes

SCRIPT = """
import sys, torch, dsq_ckpt
dsq_ckpt.async_save({"w": torch.randn(2000, 2000)}, sys.argv[1], config={"storage": {"threads": 2}})
"""


FAILS = """
import sys, torch, dsq_ckpt
from dsq_ckpt.engine import pipeline

def full(*_, **__):
    raise OSError(28, "No space left on device")

dsq_ckpt.async_save({"w": torch.ones(3)}, sys.argv[1]).result()
pipeline.write_rank = full
dsq_ckpt.async_save({"w": torch.ones(3)}, sys.argv[2])
"""


AT_EXIT = """
import atexit, sys, torch, dsq_ckpt
from numba.core.caching import NullCache
from dsq_ckpt import native
from dsq_ckpt.engine import warmup
from dsq_ckpt.kernels import cpu, jit

native.force("numba")
dsq_ckpt.save({"w": torch.randn(200, 200)}, sys.argv[1] + "-before")  # compiles the others
cpu._count_bins._reset_overloads()
cpu._count_bins._cache = NullCache()  # a kernel that is still to be compiled
warmup.wait("load")  # nothing else is compiled in the background from now on
compiled = jit.count_compilations()

def at_exit():
    state = {"w": torch.randn(200, 200)}
    try:
        dsq_ckpt.async_save(state, sys.argv[1])
    except dsq_ckpt.SaveFailed as error:
        print(error)
    dsq_ckpt.save(state, sys.argv[1])
    print("compiled", jit.count_compilations() - compiled)

atexit.register(at_exit)
"""


OTHERS_AT_EXIT = """
import atexit, copy, sys, torch, dsq_ckpt
from dsq_ckpt import lowdiff
from dsq_ckpt.cli import app
from dsq_ckpt.storage import object_store
from typer.testing import CliRunner

object_store._PIECE = 1 << 14  # data is sent in pieces
local, remote = sys.argv[1], "memory://exit/run"
state = {"w": torch.randn(200, 200)}
for run in (local + "/run", remote):
    for name in "01":
        dsq_ckpt.save(state, f"{run}/{name}")
model = torch.nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with lowdiff.GradientLog(local + "/log", model, optimizer, compressor="topk:0.1") as log:
    for _ in range(4):
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        log.step()

def dsq(*arguments):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)

def recover(**options):
    again = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(again.parameters(), 0.1, momentum=0.9)
    assert lowdiff.recover(local + "/log", again, optimizer, **options).step == 4

def at_exit():
    torch.set_num_threads(2)
    for work in (
        lambda: dsq_ckpt.save(state, f"{remote}/2"), lambda: dsq_ckpt.save(state, f"{remote}/2", overwrite=True),
        lambda: dsq_ckpt.latest(remote), lambda: dsq_ckpt.load(copy.deepcopy(state), f"{remote}/2"),
        lambda: dsq("log", local + "/run"), lambda: dsq("report", local + "/run", "-o", local + "/report.html"),
        lambda: dsq("rm", local + "/run/0"), recover, lambda: recover(merge=True),
    ):
        try:
            work()
            print("done")
        except Exception as error:
            print(repr(error))

atexit.register(at_exit)
"""


def ended(script, *arguments):
    """Status and output of a process that ended as interpreters do."""
    return processes.run(["-c", script, *map(str, arguments)], forked=True, **{forks.TEARDOWN: "1"})


def test_it_is_finished_before_the_process_ends(tmp_path):
    status, output = ended(SCRIPT, tmp_path / "1")
    assert status == 0, output
    assert Manifest.read(tmp_path / "1").refinement == "kept"


def test_one_that_begins_at_exit_says_why_it_cannot(tmp_path):
    done = processes.run_apart(["-c", AT_EXIT, str(tmp_path / "1")], **{forks.TEARDOWN: "1"})
    assert done.stdout.startswith("the interpreter is exiting") and "call dsq_ckpt.save here" in done.stdout, done
    assert done.stdout.splitlines()[1:] == ["compiled 1"], done
    assert Manifest.read(tmp_path / "1").refinement == "kept"


def test_all_else_is_done_at_exit(tmp_path):
    """The interpreter starts no thread any more then."""
    done = processes.run_apart(["-c", OTHERS_AT_EXIT, str(tmp_path)], **{forks.TEARDOWN: "1"})
    assert done.stdout.splitlines() == ["done"] * 9, done


def test_a_failure_that_nobody_asks_about_is_reported(tmp_path):
    """As of the last save of a program, which ended without a word and without its last checkpoint."""
    _, output = ended(FAILS, tmp_path / "1", tmp_path / "2")
    assert "the last asynchronous save failed: SaveFailed" in output and "No space left" in output, output
    assert not (tmp_path / "2").exists()
