"""A few trials of each campaign of `scripts/campaigns`, with a fixed seed; `make campaign` does them all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from campaign import CAMPAIGNS
from campaigns import harness, kills, subjects
from campaigns.harness import Campaign, Found

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SCRIPT = str(SCRIPTS / "campaign.py")


@pytest.mark.slow(50)
def test_campaigns() -> None:
    """Nothing is wrong, crashes or hangs in any; one lane does them all, since to begin takes longer than trials."""
    status, output = processes.run([SCRIPT, "all", "--seed", "7", "--short", "--lanes", "1"], forked=True)
    print(output)
    assert status == 0, output[-8000:]


@pytest.mark.slow(15)
def test_what_kills_of_a_log_cost_is_measured(tmp_path: Path) -> None:
    """By trials as those of the campaign `kills`."""
    status, output = processes.run([
        str(SCRIPTS / "evaluate_lowdiff.py"), "kills", "--trials", "2", "--seed", "11",
        "--json", str(tmp_path / "kills.json"),
    ], forked=True)
    assert status == 0, output[-8000:]
    measured = json.loads((tmp_path / "kills.json").read_text())
    summary = measured["summary"]
    assert summary["trials"] == len(measured["trials"]) == 2 and summary["problems"] == []
    assert summary["recoveries"] == summary["bit-identical"]
    assert {trial["seed"] for trial in measured["trials"]} == {11, 12}


def test_checkpoints_of_killed_runs_that_lost_their_refinement_are_near_what_was_saved(tmp_path: Path) -> None:
    """By the bound of the campaign, which was a failure wherever it met the first step after four saves."""
    history = dsq_ckpt.SaveHistory()
    for step in range(1, 5):
        path = tmp_path / f"step-{step}"
        dsq_ckpt.save(subjects.state_at(step), path, config=kills._CONFIG, no_dist=True, history=history)
    assert dsq_ckpt.describe(tmp_path / "step-1")["refinement"] == "dropped"
    state: dict[str, Any] = {}
    dsq_ckpt.load(state, tmp_path / "step-1", no_dist=True, refinement=False, history=history)
    assert subjects.far(state, subjects.state_at(1), refined=False) is None


def test_attacked_deltas_have_refinement_that_is_a_difference(tmp_path: Path) -> None:
    """Files of an older layer are among those that campaigns lose, alter and forge."""
    subjects.make(tmp_path)
    for run in ("deltas", "deltas-other"):
        assert any(file.role == "older_refinement" for file in Manifest.read(tmp_path / run / "step-3").files)


def test_the_documentation_has_the_last_results() -> None:
    """Full runs of all campaigns, in which nothing was wrong, crashed or hung."""
    text = (processes.ROOT / "docs" / "design" / "campaigns.md").read_text()
    for kind in CAMPAIGNS.values():
        tree = json.loads((processes.ROOT / "benchmarks" / "results" / f"campaign-{kind.name}.json").read_text())
        counts = [tree["all"][outcome] for outcome in ("tried", *harness.OUTCOMES)]
        assert counts[0] >= kind.full and not any(counts[-len(harness.BAD):]), kind.name
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{kind.name}` |"))
        assert row.endswith(f"| {' | '.join(f'{number:,}' for number in counts)} |"), row


class Mixed(Campaign):
    """Trials of every outcome."""

    name = "mixed"
    full = few = 14
    seconds = 1.5
    memory = 1 << 28

    def load(self) -> None:
        """Load nothing."""

    def prepare(self) -> None:
        (self.directory / "ready").touch()

    def begin(self) -> None:
        assert (self.directory / "ready").exists()

    def kind(self, number: int) -> str:
        return ("fine", "found", "wrong", "raises", "dies", "hangs", "large")[number % 7]

    def trial(self, number: int) -> Found:
        kind = self.kind(number)
        if kind == "raises":
            raise ValueError("no error of ours")
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs":
            time.sleep(1000)
        if kind == "large":
            assert len(bytearray(1 << 29))
        return Found({"fine": "unchanged", "found": "detected", "wrong": "wrong"}[kind], str(self.rng(number).random()))


def test_every_outcome_is_counted(tmp_path: Path) -> None:
    """Crashes and hangs of a trial are counted, and those after it still run; a trial is the same when it is alone."""
    messages: list[str] = []
    tally = harness.run(Mixed(3, tmp_path), range(14), 2, messages.append)
    assert dict(tally.total) == {"unchanged": 2, "detected": 2, "wrong": 2, "crashed": 6, "hung": 2}
    assert {kind: dict(row) for kind, row in tally.rows.items()} == {
        "fine": {"unchanged": 2}, "found": {"detected": 2}, "wrong": {"wrong": 2}, "raises": {"crashed": 2},
        "dies": {"crashed": 2}, "hangs": {"hung": 2}, "large": {"crashed": 2},
    }
    assert not tally.good and len(messages) == len(tally.failures) == 10
    assert any("ValueError: no error of ours" in line for line in messages)
    assert any("MemoryError" in line for line in messages)
    assert tally.as_json()["rows"]["hangs"]["hung"] == 2 and "wrong" in tally.table("mixed")
    alone = harness.run(Mixed(3, tmp_path), [9], 1, messages.append)
    assert alone.failures == [failure for failure in tally.failures if failure["number"] == 9]
