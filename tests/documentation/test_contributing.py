"""CONTRIBUTING.md names files and make targets that exist, and commits are checked by the tools that CI has."""

from __future__ import annotations

import re

import yaml

from tests.helpers.processes import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_paths_exist() -> None:
    paths = set(re.findall(r"`((?:dsq_ckpt|tests|docs|scripts|configs|examples|benchmarks)/[\w/.-]*)`", TEXT))
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([\w-]+)", TEXT, re.M))
    assert {"venv", "lint", "test", "docs", "campaign"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)]


def test_commits_are_checked_as_make_lint_does() -> None:
    """Ruff in the version of constraints.txt, and the other tools of the Makefile's target."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ruff = next(repository for repository in repositories if repository["repo"].endswith("/ruff-pre-commit"))
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None and ruff["rev"] == f"v{pinned[1]}"
    local = next(repository for repository in repositories if repository["repo"] == "local")
    entries = [hook["entry"] for hook in local["hooks"]]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0].replace("$(BIN)", ".venv/bin")
    commands = [line.strip() for line in lint.splitlines()[1:]]
    assert commands == [".venv/bin/ruff check .", *entries]
