"""`dsq compress`: one checkpoint from a file that somebody wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.cli.inspection import print_contents
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.manifest import Manifest
from dsq_ckpt.oneshot import compress
from dsq_ckpt.trees import named_tree


def run(source: Path, target: Path, config: str | None, system: str | None, overwrite: bool, as_json: bool) -> None:
    """Compress, and print what came of it.

    Raises:
        DSQError: see `dsq_ckpt.compress`.
    """
    about = compress(source, target, config=configuration(config, system), overwrite=overwrite)
    logical, kept = about["bytes_logical"], about["bytes_kept"]
    if as_json:
        output.print_json({
            "source": str(source), "path": str(target), **about, "ratio_kept": output.quotient(logical, kept),
        })
        return
    manifest = Manifest.read(target)
    screen = output.console()
    screen.print(output.fields([
        ("source", str(source)), ("checkpoint", str(target)), ("system", manifest.config["system"]),
        ("uncompressed", output.size(logical)), ("written", f"{output.size(kept)} ({output.ratio(logical, kept)})"),
        ("took", output.seconds(manifest.seconds)),
    ]))
    screen.print()
    print_contents(target, manifest)


def configuration(config: str | None, system: str | None) -> DSQConfig:
    """A configuration from a file or the name of a preset, over the defaults of a system.

    Raises:
        ConfigError: there is no such file or preset, or it is wrong.
    """
    tree: dict[str, Any] = {} if config is None else named_tree(config)
    try:
        return DSQConfig.create({**tree, "system": system} if system is not None else tree)
    except ConfigError as error:
        raise ConfigError(str(error).replace("configuration", config or "--system", 1)) from None
