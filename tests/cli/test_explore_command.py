"""`dsq compress --evaluate`: within a bound, and with `--explore` within several."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import dsq_ckpt
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGE = """
import torch
from torch import nn

def judge():
    model = nn.Linear(96, 64)
    g = torch.Generator().manual_seed(0)
    x, noise = torch.randn(256, 96, generator=g), torch.randn(256, 64, generator=g)
    y = x @ torch.load("in.pt")["weight"].T + noise
    return model, lambda: float((model(x) - y).square().mean().detach())

def fails():
    raise ValueError("no data")

def ends():
    raise SystemExit(3)

def wrong():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "my_judges.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # taken away again, with what the command adds
    monkeypatch.delitem(__import__("sys").modules, "my_judges", raising=False)
    torch.save(nn.Linear(96, 64).state_dict(), tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_one_bound(source, tmp_path):
    report = dsq_json("compress", source, tmp_path / "a", "--evaluate", "my_judges:judge", "--max-degradation", "0.05")
    assert report["quality"]["satisfied"] and report["quality"]["degradation"] <= 0.05
    text = dsq_stdout("compress", source, tmp_path / "b", "--evaluate", "my_judges:judge", "--max-degradation", "0.05")
    assert re.search(r"degradation +\S+ % of the metric, by \d+ evaluations", text)


def test_several_bounds(source, tmp_path):
    options = "--explore", "--evaluate", "my_judges:judge", "--bounds", "0.1,0.01"
    text = dsq_stdout("compress", source, tmp_path / "a", *options, "--plot", tmp_path / "front.svg", columns=240)
    rows = re.findall(r"^ *(10|1) % +\S+ % +\S+ KiB +\S+x +\d+ +\S+ s .*(within-0\.1|within-0\.01) *$", text, re.M)
    assert rows == [("10", "within-0.1"), ("1", "within-0.01")]
    assert (tmp_path / "front.svg").read_text().startswith("<?xml")
    assert "there already" in dsq_error("compress", source, tmp_path / "b", *options, "--plot", tmp_path / "front.svg")
    checkpoints = dsq_json("compress", source, tmp_path / "a", *options, "--overwrite")["checkpoints"]
    assert [checkpoint["max_degradation"] for checkpoint in checkpoints] == [0.1, 0.01]
    for checkpoint in checkpoints:
        assert checkpoint["bytes_kept"] == dsq_ckpt.describe(checkpoint["path"])["bytes_kept"]
        assert checkpoint["degradation"] <= checkpoint["max_degradation"]


@pytest.mark.parametrize(("options", "says"), [
    (["--explore"], "--explore needs --evaluate MODULE:FUNCTION"),
    (["--explore", "--evaluate", "judge"], "expected MODULE:FUNCTION"),
    (["--explore", "--evaluate", "my_judges:nothing"], "my_judges:nothing: cannot be imported"),
    (["--explore", "--evaluate", "no_such_module:judge"], "No module named 'no_such_module'"),
    (["--explore", "--evaluate", "my_judges:fails"], "the function raised ValueError: no data"),
    (["--explore", "--evaluate", "my_judges:ends"], "the function raised SystemExit: 3"),
    (["--explore", "--evaluate", "my_judges:judge", "--plot", "there.png"], "which is there already"),
    (["--explore", "--evaluate", "my_judges:judge", "--plot", "none/front.png"], "there is no directory 'none'"),
    (["--explore", "--evaluate", "my_judges:wrong"], "returned Linear; expected the model and a function"),
    (["--explore", "--evaluate", "my_judges:judge", "--bounds", "0.1,x"], "expected numbers with commas"),
    (["--explore", "--evaluate", "my_judges:judge", "--bounds", "5"], "above 0 and below 1, such as 0.01 for 1 %"),
    (["--explore", "--evaluate", "my_judges:judge", "--plot", "front.txt"], "ends in .png, .svg or .pdf"),
    (["--explore", "--evaluate", "my_judges:judge", "--max-degradation", "0.1"], "give --bounds"),
    (["--explore", "--evaluate", "my_judges:judge", "--mpi"], "leave --mpi out"),
    (["--bounds", "0.1"], "are for --explore"),
    (["--plot", "front.svg"], "are for --explore"),
    (["--max-degradation", "0.1"], "needs evaluate"),
])
def test_errors(source, tmp_path, options, says):
    (tmp_path / "there.png").mkdir()
    assert says in dsq_error("compress", source, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists() and not (tmp_path / "front.svg").exists()
