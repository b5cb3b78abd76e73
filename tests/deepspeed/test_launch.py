"""`python -m dsq_ckpt.launch`: what the script sees, what is refused, and DeepSpeed's own launcher around it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from dsq_ckpt import launch
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import forks
from tests.helpers.deepspeed_processes import ON_CPU, by_torchrun, python
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT, make_environment

SCRIPT = """
import sys
import {sibling}
print("argv", sys.argv, __name__, __file__)
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A directory with a script and a package; what is installed is counted, and DeepSpeed is not imported."""
    installed = []
    monkeypatch.setattr(launch, "install", lambda: installed.append(1))
    monkeypatch.setattr(launch, "get_block_flags", lambda: [True])
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "train.py").write_text(SCRIPT.format(sibling="launch_sibling"))
    (tmp_path / "launch_sibling.py").touch()
    package = tmp_path / "launch_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SCRIPT.format(sibling="launch_package"))
    monkeypatch.chdir(tmp_path)
    return installed


@pytest.mark.parametrize("before, given", [
    ([], []),
    (["--local_rank=0"], ["--local_rank=0"]),
    (["--local-rank=1"], ["--local-rank=1"]),
])
def test_script(scripts, capsys, before, given):
    launch.main([*before, "train.py", "--steps", "3", "-m"])
    said = capsys.readouterr().out
    assert said == f"argv {['train.py', *given, '--steps', '3', '-m']} __main__ train.py\n"
    assert scripts == [1]


def test_module(scripts, capsys):
    launch.main(["--local_rank=0", "-m", "launch_package.train", "--steps", "3"])
    path = Path("launch_package", "train.py").absolute()
    assert capsys.readouterr().out == f"argv {[str(path), '--local_rank=0', '--steps', '3']} __main__ {path}\n"
    assert scripts == [1]


@pytest.mark.parametrize("arguments, says", [
    ([], "usage: python -m dsq_ckpt.launch SCRIPT"),
    (["-m"], "usage:"),
    (["--local_rank=0"], "usage:"),
    (["--steps", "3", "train.py"], "usage:"),
    (["absent.py"], "there is no script 'absent.py'; usage:"),
])
def test_usage_errors(scripts, arguments, says):
    with pytest.raises(SystemExit) as caught:
        launch.main(arguments)
    assert says in str(caught.value.code)
    assert scripts == [], "nothing is installed"


@pytest.mark.parametrize("seen, says", [
    ([], "'train.py' made no engine of DeepSpeed"),
    ([False, False], "no engine of 'train.py' had the block 'dsq_checkpoint'"),
])
def test_a_launcher_without_effect_is_reported(scripts, monkeypatch, seen, says):
    monkeypatch.setattr(launch, "get_block_flags", lambda: seen)
    with pytest.warns(UserWarning, match=says):
        launch.main(["train.py"])


@needs("deepspeed")
@pytest.mark.slow(8)
def test_deepspeeds_launcher(tmp_path):
    """It puts `--local_rank` before the script; the script calls `deepspeed.initialize` itself."""
    program = Path(sys.executable).with_name("deepspeed")
    if not program.exists():
        pytest.skip("DeepSpeed's launcher is not installed beside this Python")
    small = ["--layers", "1", "--width", "96", "--steps", "4", "--save-every", "2", "--validation-batches", "1"]
    command = ["dsq_ckpt.launch", ROOT / "scripts" / "train_deepspeed.py"]
    command += ["--plain-initialize", "--out", tmp_path / "run", *small]
    interpreter = forks.interpreter(tmp_path / "python", make_environment(ON_CPU))
    python(program, "--num_gpus", "2", "--module", *command, **{forks.EXECUTABLE: str(interpreter)})
    tags = [tmp_path / "run" / f"global_step{step}" for step in (2, 4)]
    assert [Manifest.read(tag).depth for tag in tags] == [0, 1]
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"
    shutil.rmtree(tags[0])
    assert f"resumed_from {tags[1]}" in by_torchrun("-m", *command, "--steps", "5")
