"""`make evaluate` and `make evaluate-quick`: every command parses, and the full set has the files of the pages."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import evaluate_all
import pytest
from evaluation import names, oneshot, transfer
from evaluation.peers.comparison import JOBS
from typer import Typer
from typer.main import get_command

from dsq_ckpt.cli import app as dsq
from dsq_ckpt.config.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
TABLES = {"quick": evaluate_all.QUICK, "full": evaluate_all.FULL}
RESULTS = ROOT / "benchmarks" / "results"


class Parsed(Exception):
    """The arguments of a program are good, and it need not run."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let a program's own parser read a command; return the values of the arguments."""
    program, *arguments = words
    if program == "dsq":
        return of_group(dsq, arguments)
    path = (Path("scripts") / program).with_suffix("")
    module = importlib.import_module(path.name)
    if isinstance(getattr(module, "app", None), Typer):
        return of_group(module.app, arguments)
    read = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> None:
        raise Parsed(vars(read(self, *given)))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(Parsed) as caught:
        module.main()
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    parameters: dict[str, Any] = caught.value.args[0]
    return parameters


def of_group(app: Typer, arguments: list[str]) -> dict[str, Any]:
    name, *rest = arguments
    parameters: dict[str, Any] = get_command(app).commands[name].make_context(name, rest).params
    return parameters


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_command_parses(table, tmp_path, monkeypatch) -> None:
    """By the programs' own parsers, in the order in which they run: files that a command reads are made before."""
    known = {"workload": names(), "systems": [*SYSTEMS, "noise"], "peers": JOBS}
    own = {"oneshot": oneshot.SYSTEMS, "transfer": transfer.SYSTEMS}
    recorded = set()
    for words, file in evaluate_all.steps(table, tmp_path):
        arguments = parse(words, monkeypatch)
        assert file is None or str(file) in map(str, arguments.values()), words
        for key, value in arguments.items():
            if words[0] == "evaluate.py" and key in known:
                given = value if isinstance(value, list) else re.split(",(?! )", value)
                assert set(given) <= set(own.get(words[1], known[key]) if key == "systems" else known[key]), words
        if words[:2] == ["evaluate.py", "record"]:
            recorded.add((arguments["workload"], arguments["seed"]))
        elif words[0] == "evaluate.py" and words[1] in ("offline", "peers", "ablations"):
            runs = arguments["workload"] if isinstance(arguments["workload"], list) else [arguments["workload"]]
            seeds = arguments["seed"] if isinstance(arguments["seed"], list) else [arguments["seed"]]
            assert {(run, seed) for run in runs for seed in seeds} <= recorded, words
        if file is not None:
            file.touch()


def test_a_wrong_option_does_not_parse(monkeypatch) -> None:
    for words in (["evaluate.py", "online", "llama", "--failure", "3"], ["measure_chain.py", "--save", "x"],
                  ["dsq", "bench", "--stalls"]):
        with pytest.raises(BaseException) as caught:
            parse(words, monkeypatch)
        assert not isinstance(caught.value, Parsed)


def test_the_full_set_makes_every_file_of_the_pages() -> None:
    docs = ROOT / "docs"
    page = "".join(path.read_text() for path in [docs / "evaluation.md", *docs.glob("evaluation/*.md")])
    # Not made there: what needs a GPU, or packages that no extra of this one names.
    linked = set(re.findall(r"results/([\w-]+)\.json", page)) - {
        "oneshot-torchcrepe", "gpu-h100", "gpu-h100-triton39", "online-large",
    }
    stems = {step.file.stem for step in evaluate_all.steps(evaluate_all.FULL, Path()) if step.file}
    assert not {re.sub(r"-2-core-amd-epyc.*|-first", "", name) for name in linked} - stems


def test_the_full_set_makes_every_run_of_the_files(monkeypatch) -> None:
    """Each workload and seed, with each number of failures and system, of which a file has a row."""
    planned_runs: set[tuple[Any, ...]] = set()
    for words, file in evaluate_all.steps(evaluate_all.FULL, Path()):
        if file is not None and words[:2] == ["evaluate.py", "online"]:
            arguments = parse(words, monkeypatch)
            planned_runs |= {(file.stem, arguments["workload"], arguments["seed"], arguments["failures"], system)
                     for system in arguments["systems"].split(",")}
        elif file is not None and words[0] == "evaluate.py" and words[1] in ("resume", "oneshot", "transfer"):
            arguments = parse(words, monkeypatch)
            planned_runs |= {(file.stem, name, seed) for name in arguments["workload"] for seed in arguments["seed"]}
    measured: set[tuple[Any, ...]] = set()
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        if document.get("measured") == "online" and path.stem != "online-large":  # which needs a GPU
            measured |= {(path.stem, *(row[key] for key in ("workload", "seed", "failures", "name")))
                         for row in document["rows"]}
        elif document.get("measured") in ("resume", "oneshot", "transfer"):
            runs = [row["settings"] for row in document["rows"]]
            measured |= {(path.stem, run["workload"], run["seed"]) for run in runs
                         if run["workload"] not in ("silero", "torchcrepe")}  # of packages that are not installed
    assert len(measured) > 100
    assert not measured - planned_runs


def test_files_are_made_once_but_for_those_that_keep_rows() -> None:
    for table in TABLES.values():
        steps = [step for step in evaluate_all.steps(table, Path()) if step.file]
        assert len({tuple(step.words) for step in steps}) == len(steps)
        for step in steps:
            twice = sum(other.file == step.file for other in steps) > 1
            assert not twice or step.words[1] == "online", step.words


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    """Commands that ended well are not run again, one that failed is, and does not stop the others."""
    (tmp_path / "good.py").write_text("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(sys.argv[0])\n")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(evaluate_all, "program", lambda words: [sys.executable, str(tmp_path / words[0]), *words[1:]])
    out = tmp_path / "results"
    table = "one   good.py\n-     bad.py\ntwo   good.py\n"
    assert evaluate_all.run(table, out) == ["bad.py"]
    assert (out / "one.json").is_file() and (out / "two.json").is_file()
    (out / "one.json").unlink()
    (tmp_path / "bad.py").write_text("")
    assert evaluate_all.run(table, out) == []
    assert not (out / "one.json").exists()
    assert len(json.loads((out / "steps.json").read_text())) == 3


def test_all_that_can_be_drawn_is_drawn(tmp_path) -> None:
    for name in ("offline-papers-gpt-seed0", "peers-llama-seed0", "growth-gpt", "oneshot"):
        (tmp_path / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes())
    evaluate_all.draw(tmp_path)
    assert {file.stem for file in tmp_path.glob("*.png")} == {"offline-papers-gpt-seed0", "growth-gpt", "overview"}


def test_the_page_says_how_many_commands_the_shortened_set_has() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert f"runs {len(evaluate_all.steps(evaluate_all.QUICK, Path()))} commands" in page
