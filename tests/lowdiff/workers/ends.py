"""A script that ends in some way in the middle of training, without closing its log, and without a guard around it.

argv = a directory, ways to end. Each way is a process of its own, all at once.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.loops import Case, Loop

Nursery()
torch.set_num_threads(1)
CASE = Case(lambda model: torch.optim.Adam(model.parameters(), 0.01))
children = {}
for way in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        break
    children[child] = way
else:
    for child, way in children.items():
        print(way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()

loop = Loop(CASE)
log = loop.log(Path(sys.argv[1]) / way, compressor="none", batch=1000)
for number in range(7):
    loop.step(number)
    log.step()
    if number == 5 and way == "raises":
        raise RuntimeError("on purpose")
    if number == 5 and way == "SIGINT":
        os.killpg(0, signal.SIGINT)
    if number == 5 and way == "SIGTERM":
        os.killpg(0, signal.SIGTERM)
    if number == 5 and way == "exits":
        sys.exit(3)
    if number == 5 and way == "dies":
        os._exit(4)
