"""The examples of README.md and of most pages of docs/ run as they stand; their lists are complete."""

import logging
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
OWN_TESTS = {"deepspeed", "huggingface", "lightning", "lowdiff", "papers", "remote", "torchft", "torchtitan"}
"""Pages whose examples other tests run."""
PAGES = {"README": README} | {
    str(page.relative_to(DOCS).with_suffix("")): page.read_text() for page in sorted(DOCS.glob("**/*.md"))
    if page.stem not in OWN_TESTS
}
PYTHON = [(name, example) for name, text in PAGES.items() for example in re.findall(r"```python\n(.*?)```", text, re.S)]
SHELL = [line.partition("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", PAGES["cli"], re.S)
         for line in block.splitlines() if line.startswith("dsq ")]


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(128, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(50)).square().mean().backward()
    optimizer.step()

    def train_on_a_batch(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss_of(model):
        tokens = torch.arange(100)
        return nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 100)

    level = logging.getLogger("dsq_ckpt").level
    yield {
        "model": model, "optimizer": optimizer, "state_dict": model.state_dict(), "train_on_a_batch": train_on_a_batch,
        "loss_on_a_few_batches": lambda model: float(loss_of(model)),
    }
    logging.getLogger("dsq_ckpt").setLevel(level)  # an example changes it


@pytest.mark.usefixtures("forked_logs")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_examples(training, number):
    name, example = PYTHON[number]
    exec(compile(example, f"{name}.md", "exec"), dict(training))


def test_pages_have_examples():
    assert [name for name, _ in PYTHON] == [
        *["README"] * 4, "cli", "configuration", "dcp", "index", "loop", *["oneshot"] * 3, "report",
    ]


def test_shell_examples(training):
    state = {"model": training["model"].state_dict(), "step": 500}
    dsq_ckpt.save(state, "run/step-000500")
    commands = {
        "log", "watch", "report", "inspect", "verify", "export", "compress", "merge", "gc", "rm", "cp", "warmup",
        "bench",
    }
    assert {line.split()[1] for line in SHELL} == commands
    for line in SHELL:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "watch":
            arguments += ["--once"]
        if arguments == ["bench"]:
            arguments += ["--parameters", "200000", "--repeats", "1"]
        if arguments[0] == "merge":
            for number in range(3):
                weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(number))
                dsq_ckpt.save({"w": weight}, f"lc/step-{number}", config={"system": "lc"})
            arguments[1] = "lc/step-2"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (line, result.output)
    assert Path("out.pt").exists()


JUDGED = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(128, 100))

def loss_on_a_few_batches(model):
    tokens = torch.arange(100)
    return float(nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 100))

"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shell_examples_with_a_model(training, monkeypatch):
    module = next(text for name, text in PYTHON if name == "oneshot" and text.startswith("# my_model.py"))
    lines = re.findall(r"^dsq .*--evaluate my_model:.*$", PAGES["oneshot"], re.M)
    assert [line.split()[1:4] for line in lines] == [
        ["compress", "model.pt", "front"], ["compress", "model.pt", "compressed/model"],
    ]
    Path("my_model.py").write_text(JUDGED + module)
    torch.save(training["model"].state_dict(), "model.pt")
    monkeypatch.syspath_prepend(str(Path.cwd()))  # taken away again, with what the command adds
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    assert Path("front.png").read_bytes().startswith(b"\x89PNG")


def test_presets_are_listed():
    listed = set(re.findall(r"\{literalinclude\} \.\./configs/(\w+\.yaml)", PAGES["configuration"]))
    assert listed == {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_one_statement_about_python():
    """The package needs what setup.py says; `make`, which installs constraints.txt, what these versions need."""
    package = re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())[1]
    pinned = re.search(r"Python ([\d.]+\d) or newer", (ROOT / "constraints.txt").read_text())[1]
    assert re.findall(r"Python ([\d.]+\d) or newer", (ROOT / "Makefile").read_text()) == [pinned]
    assert re.findall(r"Both need Python ([\d.]+\d) or newer", README) == [pinned]
    assert re.findall(r"Both need Python ([\d.]+\d) or newer", PAGES["installation"]) == [pinned]
    assert re.findall(r"With Python ([\d.]+\d) or newer:\n\n```bash\npip install", PAGES["installation"]) == [package]
    assert re.findall(r"installed \(Python ([\d.]+\d) or newer\)", README) == [package]
    ruff = re.search(r'target-version = "py3(\d+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert package == f"3.{ruff}"
