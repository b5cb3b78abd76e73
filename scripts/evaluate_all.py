"""Measure what docs/evaluation.md and docs/evaluation/ show, or a shortened set of it, and draw the pictures.

    python scripts/evaluate_all.py --quick --directory evaluation    # less than an hour on two cores
    python scripts/evaluate_all.py --directory evaluation            # the full set, many hours
    python scripts/evaluate_all.py --quick --list                    # the commands, none is run

Each command writes a JSON file of the name that it has in benchmarks/results, without the machine's. Commands that have
ended are listed in steps.json with their seconds, of the clock and of the processor, and are not run again: an
interrupted run goes on where it was. One that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evaluate_commands import FULL, QUICK

from dsq_ckpt.cli import json_files

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    """A command of the evaluation, and the JSON file that it writes, None for none."""

    words: list[str]
    file: Path | None


def steps(table: str, directory: Path) -> list[Step]:
    """Return the commands of a table, `QUICK` or `FULL`, in their order; the directory is for the files."""
    result = []
    for line in re.split(r"\n(?=\S)", table.strip()):
        name, command = line.split(maxsplit=1)
        file = None if name == "-" else directory / f"{name}.json"
        words = [word.replace("{}", str(directory), 1) if word.startswith("{}") else word
                 for word in shlex.split(command)]
        result.append(Step(words if file is None else [*words, "--json", str(file)], file))
    return result


def program(words: list[str]) -> list[str]:
    """Return what runs a command: a script by its file, `dsq` as a module."""
    name, *arguments = words
    return [sys.executable, *(["-m", "dsq_ckpt"] if name == "dsq" else [str(ROOT / "scripts" / name)]), *arguments]


def run(table: str, directory: Path) -> list[str]:
    """Run the commands of a table that have not ended well before; return those that fail."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "steps.json"
    ended: dict[str, list[float]] = json.loads(log.read_text()) if log.is_file() else {}
    failed = []
    for step in steps(table, directory):
        command = shlex.join(step.words)
        if command in ended:
            continue
        print(f"$ {command}", flush=True)
        started, used = time.monotonic(), processor()
        if subprocess.run(program(step.words), check=False, cwd=ROOT).returncode:
            failed.append(command)
            continue
        ended[command] = [round(time.monotonic() - started, 1), round(processor() - used, 1)]
        json_files.write(log, ended)
    return failed


def processor() -> float:
    """Return the processor time of all commands so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def draw(directory: Path) -> None:
    """Draw each file that can be drawn, and one picture of size and degradation of all recorded runs."""
    from evaluation import report
    from evaluation.lowdiff import plots

    report.PANELS.update(plots.PANELS)
    files = sorted(file for file in directory.glob("*.json") if file.name != "steps.json")
    drawings = [
        partial(report.plot, file, file.with_suffix(".png")) for file in files
        if json.loads(file.read_text()).get("measured") in report.PANELS
    ]
    if recorded := [file for file in files if file.name.startswith(("offline-", "peers-"))]:
        drawings.append(partial(report.plot_together, recorded, directory / "overview.png"))
    for drawing in drawings:
        try:
            drawing()
        except report.PlotError as error:
            print(f"not drawn: {error}", file=sys.stderr)


def main() -> int:
    """Run, draw, and return the exit status: 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortened set")
    parser.add_argument("--directory", type=Path, default=Path("evaluation"), help="for JSON files and pictures")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    arguments = parser.parse_args()
    table, directory = QUICK if arguments.quick else FULL, arguments.directory.absolute()
    if arguments.list:
        for step in steps(table, arguments.directory):
            print(shlex.join(step.words))
        return 0
    failed = run(table, directory)
    for command in failed:
        print(f"FAILED: {command}", file=sys.stderr)
    draw(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
