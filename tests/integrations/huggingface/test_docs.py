"""The commands of docs/huggingface.md run as they stand; a Trainer without `attach` goes on from what they wrote."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.deepspeed.launched import ON_CPU
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT, run, start

pytestmark = [pytest.mark.slow, needs("transformers", "accelerate")]
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
COMMANDS = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if "dsq export" in block]
WORKERS = Path(__file__).parent / "workers"


def test_a_plain_trainer_resumes_with_optimizer_and_schedule(tmp_path: Path) -> None:
    """Moments, steps and rates are those that a Trainer with `attach` resumes with."""
    example = str(ROOT / "examples" / "hf_trainer.py")
    status, output = run([example, "--out", "run", "--steps", "10"], directory=tmp_path, forked=True, **ON_CPU)
    assert status == 0, output[-4000:]
    assert len(COMMANDS) == 2 and "optimizer.pt" in COMMANDS[1]
    script = "set -e\n" + f'dsq() {{ "{sys.executable}" -m dsq_ckpt "$@"; }}\n'
    for block in COMMANDS:
        shell = start(["-c", script + block.replace("checkpoint-500", "checkpoint-10")], python="bash",
                      directory=tmp_path)
        output, _ = shell.communicate(timeout=240)
        assert shell.returncode == 0, output
    status, output = run([str(WORKERS / "plain_again.py"), example], directory=tmp_path, forked=True, **ON_CPU)
    assert status == 0 and "ok resumed alike" in output, output[-4000:]
