"""`dsq` run in this process, and files to damage."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from dsq_ckpt.cli import app
from dsq_ckpt.storage.manifest import Manifest


def run_dsq(*arguments, columns=None):
    """Run a command in this process."""
    environment = {"COLUMNS": None if columns is None else str(columns), "FORCE_COLOR": None, "NO_COLOR": None}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def dsq_stdout(*arguments, columns=None):
    result = run_dsq(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    return result.stdout


def dsq_json(*arguments, code=0):
    """The JSON document that a command prints, and nothing but it."""
    result = run_dsq(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def unwrap_text(text):
    """The words of a text that was wrapped, perhaps in a box: long paths in it decide where lines break."""
    return " ".join(text.replace("│", " ").split())


def dsq_error(*arguments):
    """The one line that a failing command prints."""
    result = run_dsq(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def find_file(path, role="own"):
    """The file of a role."""
    return path / next(file.name for file in Manifest.read(path).files if file.role == role)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)  # in place: every directory it is linked into sees it
