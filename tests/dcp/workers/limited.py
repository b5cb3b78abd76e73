"""Saves under a limit on the size of files, as on a disk that fills up: argv = run directory, limits in bytes."""

from __future__ import annotations

import resource
import signal
import sys
import warnings
from pathlib import Path

import dsq_ckpt
from tests.helpers.states import DecodedCheckpoints, mixed_state, perturb


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run, limits = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    state = mixed_state()
    dsq_ckpt.save(state, run / "0", pinned=True)
    dsq_ckpt.save(perturb(state, 1), run / "1", pinned=True)
    checkpoints = DecodedCheckpoints(state, run / "0", run / "1")
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes = []
    for number, limit in enumerate(limits):
        for parent in ("auto", None):
            path = run / f"limited-{number}-{parent}"
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
            try:
                dsq_ckpt.save(perturb(state, 2), path, parent=parent)
                outcomes.append("saved")
            except BaseException as error:
                assert "File too large" in str(error), error
                assert not path.exists(), list(path.iterdir())
                outcomes.append("refused")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, whole)
            checkpoints.check()
    print("outcomes", *outcomes)


if __name__ == "__main__":
    main()
