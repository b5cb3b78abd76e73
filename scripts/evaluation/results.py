"""Rows of a command that takes long, in a file that an interrupted command goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import json_files
from evaluation.recording import one_thread
from evaluation.report import Row, document


class Results:
    """Rows of a command, written to a JSON file after each, so that an interrupted command need not start anew.

    Args:
        path: The file; None: nothing is written. Rows that are there already are kept.
        measured: Name of the command.
        settings: Its arguments.
        conclude: What follows from the rows, as further keys of the document.

    Raises:
        ValueError: The file holds what another command, machine or version of torch has measured.
    """

    def __init__(
        self, path: Path | None, measured: str, settings: Mapping[str, Any],
        conclude: Callable[[Sequence[Row]], Mapping[str, Any]] = lambda rows: {},
    ) -> None:
        self._path, self._measured, self._settings, self._conclude = path, measured, settings, conclude
        self.rows: list[Row] = []
        if path is not None and path.is_file():
            known, now = json.loads(path.read_text()), self._document()
            for key, there, here in (
                ("measured", known["measured"], measured), ("torch", known["torch"], now["torch"]),
                ("processor", known["machine"]["processor"], now["machine"]["processor"]),
            ):
                if there != here:
                    raise ValueError(f"{path} has {key} {there!r}, this is {here!r}: name another file")
            self.rows = known["rows"]

    def find(self, settings: Mapping[str, Any]) -> Row | None:
        """Return the row that was measured with these settings."""
        wanted = json.loads(json.dumps(settings))
        return next((row for row in self.rows if row["settings"] == wanted), None)

    def add(self, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> Row:
        """Take in a row and write the file; returns the row as it is there, without NaN."""
        self.rows.append({**figures, "settings": settings})
        content = self._document()
        self.rows = content["rows"]
        if self._path is not None:
            json_files.write(self._path, content)
        return self.rows[-1]

    def of_each_run(
        self, workloads: Sequence[str], seeds: Sequence[int], settings: Mapping[str, Any],
        compare: Callable[[str, int], Iterable[Row]],
    ) -> list[Row]:
        """Return the rows of every workload and seed; `compare` makes those of a run that are not in the file."""
        for name in workloads:
            for seed in seeds:
                own = {"workload": name, "seed": seed, **settings}
                if self.find(own) is None:
                    self.add(own, {"rows": list(compare(name, seed))})
        return [row for part in self.rows for row in part["rows"]]

    def _document(self) -> Row:
        with one_thread():  # it says with how many threads torch ran
            return document(self._measured, self._settings, self.rows, **self._conclude(self.rows))
