"""Try what may go wrong with checkpoints, thousands of times: altered files, kills, failing system calls, power cuts.

    python scripts/campaign.py all --json benchmarks/results    # all campaigns in full, some hours on two cores
    python scripts/campaign.py accidents --trials 200           # a part of one
    python scripts/campaign.py accidents --seed 3 --only 17     # one trial again

Each prints a table of what was tried and what came of it; exit status 1 unless wrong, crashed and hung are zero.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from campaigns import calls, harness
from campaigns.accidents import Accidents
from campaigns.crowds import Crowds
from campaigns.faults import Faults
from campaigns.forged import Forged
from campaigns.harness import Campaign
from campaigns.kills import Kills
from campaigns.logs import Logs
from campaigns.long import Long
from campaigns.power import Power
from campaigns.tags import Tags

from dsq_ckpt.cli import json_files

CAMPAIGNS: dict[str, type[Campaign]] = {
    campaign.name: campaign for campaign in (Accidents, Forged, Logs, Tags, Faults, Power, Kills, Crowds, Long)
}


def main(
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(CAMPAIGNS)}, or all.")],
    trials: Annotated[int | None, typer.Option(help="How many; by default those of a full (or short) run.")] = None,
    seed: Annotated[int | None, typer.Option(help="A random one by default.")] = None,
    only: Annotated[list[int] | None, typer.Option(help="This trial alone; several times for several.")] = None,
    lanes: Annotated[int, typer.Option(help="Processes at once.")] = os.cpu_count() or 1,
    json_directory: Annotated[Path | None, typer.Option("--json", help="Directory for the results.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Work in this directory, and leave it.")] = None,
    short: Annotated[bool, typer.Option("--short", help="Each trial as small as it can be, as in tests.")] = False,
) -> None:
    """Try what may go wrong with checkpoints."""
    chosen = list(CAMPAIGNS) if names == ["all"] else names
    if unknown := set(chosen) - set(CAMPAIGNS):
        raise typer.BadParameter(f"{sorted(unknown)}: not among {', '.join(CAMPAIGNS)}")
    seed = random.randrange(1 << 30) if seed is None else seed
    if any(CAMPAIGNS[name].preload for name in chosen) and not calls.loaded():
        with tempfile.TemporaryDirectory() as temporary:
            words = [*sys.argv, *(() if "--seed" in sys.argv else ("--seed", str(seed)))]
            raise typer.Exit(calls.run_under_shim(words, Path(temporary)))
    good = True
    for name in chosen:
        good &= run_campaign(CAMPAIGNS[name], seed, trials, only, lanes, json_directory, keep, short)
    raise typer.Exit(0 if good else 1)


def run_campaign(
    kind: type[Campaign], seed: int, trials: int | None, only: list[int] | None, lanes: int, results: Path | None,
    keep: Path | None, short: bool,
) -> bool:
    """Run a campaign; whether nothing went wrong."""
    started = time.monotonic()
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None  # thousands of copies of small files
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        campaign = kind(seed, keep or Path(temporary), short)
        usual = campaign.few if short else campaign.full
        numbers = only or range(usual if trials is None else trials)
        tally = harness.run(campaign, numbers, lanes)
    print(tally.table(campaign.name), f"seed {seed}, {time.monotonic() - started:.0f} s", sep="\n", flush=True)
    if results is not None:
        command = f"python scripts/campaign.py {campaign.name} --trials {len(numbers)} --seed {seed}"
        tree = {
            "campaign": campaign.name, "command": command,
            **tally.as_json(), "seconds": round(time.monotonic() - started),
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        }
        json_files.write(results / f"campaign-{campaign.name}.json", tree)
    return tally.good


if __name__ == "__main__":
    typer.run(main)
