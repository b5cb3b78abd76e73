"""The commands of docs/huggingface.md run as they stand; a Trainer without `attach` goes on from what they wrote, and
so does a changed model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.deepspeed_processes import ON_CPU
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT, run, start

pytestmark = [pytest.mark.slow, needs("transformers", "accelerate")]
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
COMMANDS = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if "dsq export" in block]
WORKERS = Path(__file__).parent / "workers"


EXAMPLE = str(ROOT / "examples" / "hf_trainer.py")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run of the example, and what the commands export of it."""
    directory = tmp_path_factory.mktemp("exported")
    status, output = run([EXAMPLE, "--out", "run", "--steps", "10"], directory=directory, forked=True, **ON_CPU)
    assert status == 0, output[-4000:]
    assert len(COMMANDS) == 2 and "optimizer.pt" in COMMANDS[1]
    python = forks.interpreter(directory / "python")
    script = "set -e\n" + f'dsq() {{ "{python}" -m dsq_ckpt "$@"; }}\n'
    for block in COMMANDS:
        shell = start(["-c", script + block.replace("checkpoint-500", "checkpoint-10")], python="bash",
                      directory=directory)
        output, _ = shell.communicate(timeout=240)
        assert shell.returncode == 0, output
    return directory


def test_a_plain_trainer_resumes_with_optimizer_and_schedule(exported: Path) -> None:
    """Moments, steps and rates are those that a Trainer with `attach` resumes with."""
    status, output = run([str(WORKERS / "plain_again.py"), EXAMPLE], directory=exported, forked=True, **ON_CPU)
    assert status == 0 and "ok resumed alike" in output, output[-4000:]


def test_a_changed_model_goes_on_from_the_weights(exported: Path) -> None:
    """With larger embeddings as the page has it; and with a layer more, or another head."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "resize_token_embeddings" in block]
    script = exported / "changed.py"
    before = [f"import runpy\ndata = runpy.run_path({EXAMPLE!r})['Counting']()\n"]
    after = [
        "from safetensors.torch import load_file",
        "from transformers import AutoModelForSequenceClassification",
        "stored = load_file('plain/model.safetensors')['transformer.h.0.attn.c_attn.weight']",
        "assert trainer.model.get_input_embeddings().weight.shape[0] == 160",
        "for changed in (AutoModelForCausalLM.from_pretrained('plain', num_hidden_layers=3),",
        "                AutoModelForSequenceClassification.from_pretrained('plain')):",
        "    assert changed.state_dict()['transformer.h.0.attn.c_attn.weight'].equal(stored)",
        "print('ok changed')",
    ]
    smaller = block.replace("max_steps=500", "max_steps=2").replace("save_steps=100", "save_steps=2, report_to=[]")
    script.write_text("\n".join([*before, smaller, *after]))
    status, output = run([str(script)], directory=exported, forked=True, **ON_CPU)
    assert status == 0 and "ok changed" in output, output[-4000:]
    assert (exported / "larger" / "checkpoint-2" / "manifest.json").exists()
