"""The examples of docs/deepspeed.md run as they stand, and what it says of keys and files is so."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dsq_ckpt import DSQConfig
from tests.helpers.commands import run_dsq
from tests.helpers.deepspeed_processes import by_torchrun, python
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT

TEXT = (ROOT / "docs" / "deepspeed.md").read_text()
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", TEXT, re.S) for kind in ("python", "json", "bash")}
SHELL = [line.partition("  #")[0].strip() for block in BLOCKS["bash"] for line in block.splitlines()]
PREAMBLE = """
import os
import sys

import deepspeed
import torch
from torch import nn

deepspeed.init_distributed("gloo", verbose=False)
inputs = torch.randn(4, 80, generator=torch.Generator().manual_seed(0)).bfloat16()


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 120), nn.Tanh(), nn.Linear(120, 80))


def loss(engine):
    return (engine(inputs).float() - inputs.float()).square().mean()


def train_some_steps(engine):
    for _ in range(3):
        engine.backward(loss(engine))
        engine.step()


def loss_on_a_few_batches(engine):
    with torch.no_grad():
        return loss(engine).item()
"""


def value(key: str) -> Any:
    tree: Any = {"enabled": True, **DSQConfig().model_dump(mode="json")}
    for name in key.split("."):
        tree = tree[name]
    return tree


def test_keys_and_defaults():
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", TEXT, re.M)
    assert len(rows) >= 9
    assert {key: json.loads(default) for key, default in rows} == {key: value(key) for key, _ in rows}


def test_files_are_listed():
    listed = set(re.findall(r"`(\w+\.json)`", TEXT.partition("## The block")[2].partition("##")[0]))
    assert listed == {path.name for path in (ROOT / "configs" / "deepspeed").glob("*.json")}


def test_commands_name_what_there_is():
    for line in SHELL:
        for path in re.findall(r"configs/\S+", line):
            assert (ROOT / path).exists(), line
    assert {line.split()[0] for line in SHELL} == {"deepspeed", "torchrun", "python", "dsq"}
    for target in re.findall(r"`make ([\w-]+)`", TEXT):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


@needs("deepspeed")
@pytest.mark.slow(25)
def test_examples(tmp_path, monkeypatch):
    """All of them in one process, then the commands that convert what it saved."""
    tree = json.loads(BLOCKS["json"][0])
    (tmp_path / "ds_config.json").write_text(json.dumps(tree))
    del tree["dsq_checkpoint"]
    (tmp_path / "plain.json").write_text(json.dumps(tree))
    parts = [PREAMBLE, f"os.chdir({str(tmp_path)!r})", *(f"model = new_model()\n{code}" for code in BLOCKS["python"])]
    script = tmp_path / "examples.py"
    script.write_text("\n".join([*parts, "assert client_state['seen'] == 1000", "sys.stdout.flush()", "os._exit(0)"]))
    by_torchrun(script, count=1)
    assert (tmp_path / "run" / "global_step3" / "manifest.json").exists()
    assert (tmp_path / "searched" / "global_step3" / "manifest.json").exists()
    assert len(list((tmp_path / "logged" / "log").glob("*.closed"))) == 1

    monkeypatch.chdir(tmp_path)
    for line in SHELL:
        program, *arguments = shlex.split(line)
        if program == "python":
            python(*arguments, directory=tmp_path)
        elif program == "dsq":
            result = run_dsq(*arguments)
            assert result.exit_code == 0, (line, result.output)
    assert Path("fp32", "pytorch_model.bin").exists()
    assert Path("plain", "global_step3", "mp_rank_00_model_states.pt").exists()
