"""A demo tells first how long it takes, and leaves no ranks behind if it is terminated."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from pathlib import Path

from tests.helpers import processes

DEMO = """
import demo
demo.run_command("", 2, 2, 1, lambda path, *_: demo.must_succeed(path, "ranks", 2, target=[{script!r}]), print)
"""
RANK = """
import os, pathlib, signal
with pathlib.Path(__file__).with_name("pipe").open("w") as pipe:
    print(os.getpid(), file=pipe, flush=True)
    signal.pause()
"""


def test_ranks_end_with_a_demo_that_is_terminated(tmp_path: Path) -> None:
    """A pipe that all ranks hold open is at its end once none of them is left."""
    script, ranks = tmp_path / "rank.py", list[int]()
    script.write_text(RANK)
    os.mkfifo(tmp_path / "pipe")
    demo = processes.start(
        ["-c", DEMO.format(script=str(script))], PYTHONPATH=str(processes.ROOT / "scripts"), TMPDIR=str(tmp_path)
    )
    try:
        with (tmp_path / "pipe").open("rb+", buffering=0) as end, (tmp_path / "pipe").open("rb", buffering=0) as pipe:
            ended = os.pidfd_open(demo.pid)
            for _ in range(2):
                assert pipe in select.select([pipe, ended], [], [])[0], demo.communicate()[0]
                ranks.append(int(pipe.readline()))
            end.close()  # so far it let nobody wait for the other end of the pipe
            demo.terminate()
            output, _ = demo.communicate(timeout=processes.PATIENCE)
            assert demo.returncode == 128 + signal.SIGTERM, output
            assert re.match(r"the default of 2 steps takes \d to \d minutes on two cores\n", output), output
            os.set_blocking(pipe.fileno(), False)
            assert pipe.read(1) == b"", "a rank is left"
    finally:
        processes.kill(demo)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
