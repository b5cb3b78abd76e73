"""`dsq compress`: compression of one file of another program, by one process or by all processes of an MPI job."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from dsq_ckpt.api.oneshot import compress
from dsq_ckpt.cli import output
from dsq_ckpt.cli.inspect_command import print_contents
from dsq_ckpt.cli.metric_loader import load_metric
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.config_trees import load_tree
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, run_on_all_ranks
from dsq_ckpt.distributed.mpi import MPICommunicator, read_launcher_rank
from dsq_ckpt.errors import ConfigError, DSQError
from dsq_ckpt.storage.manifest import Manifest


def run(
    source: Path, target: Path, config: str | None, system: str | None, evaluate: str | None,
    max_degradation: float | None, overwrite: bool, as_json: bool, mpi: bool | None,
) -> None:
    """Compress, and print the result.

    Args:
        evaluate: MODULE:FUNCTION, see `load_metric`; None for no search.
        mpi: use all processes of an MPI job; None to do so if a launcher of MPI started several.

    Raises:
        DSQError: see `dsq_ckpt.compress`.
    """
    comm = MPICommunicator() if mpi or (mpi is None and read_launcher_rank().size > 1) else SingleProcess()
    with _report_errors_once(comm), output.meter("compressing", hidden=as_json or comm.rank > 0):
        loaded = run_on_all_ranks(comm, lambda: load_configuration(config, system))
        model, metric = (None, None) if evaluate is None else run_on_all_ranks(comm, lambda: load_metric(evaluate))
        description = compress(
            source, target, config=loaded, evaluate=metric, max_degradation=max_degradation, model=model,
            overwrite=overwrite, communicator=comm,
        )
    if comm.rank:
        return
    logical, kept = description["bytes_logical"], description["bytes_kept"]
    if as_json:
        output.print_json({
            "source": str(source), "path": str(target), **description, "ratio_kept": output.quotient(logical, kept),
        })
        return
    manifest, quality = Manifest.read(target), description["quality"]
    search_fields = [] if quality is None else [
        ("degradation", "weights are exact" if quality.get("degradation") is None else
         f"{output.percent(quality['degradation'])} of the metric, by {quality['evaluations']} evaluations"),
    ]
    screen = output.console()
    screen.print(output.field_table([
        ("source", str(source)), ("checkpoint", str(target)), ("system", manifest.get_setting("system")),
        ("uncompressed", output.size(logical)), ("written", f"{output.size(kept)} ({output.ratio(logical, kept)})"),
        *search_fields, ("took", output.seconds(manifest.seconds)),
    ]))
    screen.print()
    print_contents(target, manifest)


@contextmanager
def _report_errors_once(comm: Communicator) -> Iterator[None]:
    """Print an error of all ranks on rank 0 only. End all ranks if one fails outside of a collective."""
    if not isinstance(comm, MPICommunicator):
        yield
        return
    try:
        yield
    except DSQError as error:  # raised on all ranks, for the same reason
        status = output.fail(str(error)) if comm.rank == 0 else typer.Exit(1)
        comm.gather(None)  # launchers kill all processes when one fails; wait until rank 0 has printed the error
        raise status from error
    except BaseException:
        traceback.print_exc()
        comm.abort()
        raise


def load_configuration(config: str | None, system: str | None) -> DSQConfig:
    """Return the configuration of a file or preset, over the defaults of a system.

    Raises:
        ConfigError: the file or preset does not exist, or is invalid.
    """
    tree: dict[str, Any] = {} if config is None else load_tree(config)
    try:
        return DSQConfig.create({**tree, "system": system} if system is not None else tree)
    except ConfigError as error:
        raise ConfigError(str(error).replace("configuration", config or "--system", 1)) from None
