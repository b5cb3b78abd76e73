"""Paths that users give: a `Path` made of a URL is never a directory of this host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt import ConfigError, DSQStorageReader, DSQStorageWriter
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path
from tests.helpers.commands import run_dsq, unwrap_text

STATE = {"w": torch.zeros(3)}
REFUSED = {
    "save": lambda path: dsq_ckpt.save(STATE, path),
    "async_save": lambda path: dsq_ckpt.async_save(STATE, path).result(),
    "load": lambda path: dsq_ckpt.load(dict(STATE), path),
    "latest": dsq_ckpt.latest,
    "compress": lambda path: dsq_ckpt.compress(STATE, path),
    "writer": lambda path: dcp.save(STATE, storage_writer=DSQStorageWriter(path)),
    "reader": lambda path: dcp.load(dict(STATE), storage_reader=DSQStorageReader(path)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_path_made_of_a_url_is_refused_by_name(tmp_path, monkeypatch, name):
    """A path with one slash would be found nowhere but below the working directory of one host."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="path 's3:/bucket/run/1': expected a"):
        REFUSED[name](Path("s3://bucket/run/1"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*REFUSED, "describe", "merge", "source"])
def test_a_path_with_a_null_character_is_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    calls = {
        "describe": dsq_ckpt.describe, "merge": lambda path: dsq_ckpt.merge(path, "b"),
        "source": lambda path: dsq_ckpt.compress(path, "b"),
    }
    with pytest.raises(ConfigError, match=r"^path 'a\\x00b': expected no null character in it$"):
        {**REFUSED, **calls}[name]("a\0b")
    assert not list(tmp_path.iterdir())


def test_commands_refuse_one_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_dsq("log", "s3:/bucket/run")
    assert result.exit_code == 2 and "path 's3:/bucket/run': expected a URL such as" in unwrap_text(result.output)


def test_local_paths_are_what_they_were(tmp_path):
    for text in ("file:///a/b", "local:///a/b", "/a/b"):
        assert expand_path(text) == expand_path(Path(text)) == Path("/a/b")
    for path in (tmp_path / "s3:" / "run", "./a/s3:/run", "C:/run", "a:b/c"):
        assert resolve_checkpoint_path(path) == Path(path).absolute()
