"""The command line `dsq`: inspect, verify, convert and clean up checkpoints.

Tables go to stdout; `--json` prints one JSON document instead. Progress and errors go to stderr. An error is one line,
with exit status 1; a wrong call has status 2, an interrupt 130. Each command imports its modules itself, since torch
and Numba take seconds.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dsq_ckpt.cli import export_command, json_files, output
from dsq_ckpt.cli.export_command import Format, Layers
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.version import __version__


class _CommandGroup(TyperGroup):
    """A command group that prints `DSQError` and `OSError` as one line. Other errors are bugs and keep a traceback."""

    def invoke(self, ctx: Any) -> Any:
        warnings.formatwarning = _format_warning  # type: ignore[assignment]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from error
        except BrokenPipeError:
            raise  # as of `dsq log | head`; typer ends quietly
        except DSQError as error:
            raise output.fail(str(error)) from error
        except OSError as error:
            prefix = f"'{error.filename}': " if error.filename else ""
            raise output.fail(f"{prefix}{error.strerror or error}") from error


def _format_warning(message: Warning | str, category: type[Warning], *_: Any) -> str:
    return output.escape_controls(f"warning: {message}") + "\n"


app = typer.Typer(
    cls=_CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Look into, check, convert and clean up dsq_ckpt checkpoints.",
)


def _path_argument(metavar: str, help_: str) -> Any:
    return typer.Argument(metavar=metavar, help=help_, parser=expand_path)


RunPath = Annotated[Path, _path_argument("RUN", "Directory that the checkpoints of a run lie in.")]
CheckpointPath = Annotated[Path, _path_argument("CHECKPOINT", "A checkpoint directory.")]
EitherPath = Annotated[Path, _path_argument("PATH", "A checkpoint, or the directory of a run.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"dsq_ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `dsq` itself; its help is that of `app`."""


@app.command()
def log(run: RunPath, as_json: Json = False) -> None:
    """Show a run's checkpoints: bytes written and kept, ratios, chain, time.

    Ratios per checkpoint are of what is kept now, without files linked from its ancestors.
    """
    from dsq_ckpt.cli.log_command import print_history
    from dsq_ckpt.report.history import History

    with output.meter("reading the run", hidden=as_json):
        history = History.read(run)
    if as_json:
        output.print_json(history.as_json())
    else:
        print_history(history)


@app.command()
def watch(
    run: RunPath,
    interval: Annotated[
        float, typer.Option("--interval", parser=output.parse_age, metavar="TIME", help="Between looks: 2, 30s, 5m.")
    ] = "2s",  # type: ignore[assignment]
    once: Annotated[bool, typer.Option("--once", help="Print a line for each checkpoint there is, and end.")] = False,
) -> None:
    """Show a run's checkpoints as they are committed, until Ctrl-C; a line for each where stdout is no terminal."""
    from dsq_ckpt.cli import watch_command

    watch_command.run(run, max(interval, 0.1), once)


@app.command()
def report(
    run: RunPath,
    target: Annotated[
        Path, typer.Option(
            "--output", "-o", parser=expand_path, metavar="FILE", help="The page to write; makes missing directories."
        )
    ] = "report.html",  # type: ignore[assignment]
    as_json: Json = False,
) -> None:
    """Write a page about a run: sizes, quality, chains and time of its checkpoints, in one HTML file."""
    from dsq_ckpt.report import page
    from dsq_ckpt.report.history import History

    with output.meter("reading the run", hidden=as_json):
        history = History.read(run)
        hint = "" if target.absolute().parent.is_dir() else ", in a new directory"
        count = page.write(history, target)
    if as_json:
        output.print_json({"path": str(target), "bytes": count, "checkpoints": len(history.entries)})
        return
    output.console().print(
        f"{target}: {len(history.entries)} checkpoint(s), {output.size(count)}{hint}; open it in a browser",
        soft_wrap=True,
    )


@app.command()
def inspect(
    checkpoint: CheckpointPath,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor and how it is stored.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: groups, bits per element, ratios, chain."""
    from dsq_ckpt.cli import inspect_command

    if as_json:
        output.print_json(inspect_command.as_json(checkpoint, tensors))
    else:
        inspect_command.print_checkpoint(checkpoint, tensors)


@app.command()
def verify(
    path: EitherPath,
    deep: Annotated[bool, typer.Option("--deep/--no-deep", help="Decode every tensor too, along its chain.")] = True,
    as_json: Json = False,
) -> None:
    """Check size and checksum of every file, and decode every tensor; exit status 1 if anything is wrong."""
    from dsq_ckpt.cli import verify_command

    result = verify_command.verify(path, deep, as_json)
    if as_json:
        output.print_json(result.as_json())
    else:
        result.print()
    problems = []
    if result.damaged:
        problems.append(f"{len(result.damaged)} of {len(result.reports)} checkpoint(s) damaged: "
                        + ", ".join(report.name for report in result.damaged))
    if result.damaged_segments:
        count = f"{len(result.damaged_segments)} of {len(result.segments)} segment(s) of the gradient log damaged: "
        problems.append(count + ", ".join(name for name, _ in result.damaged_segments))
    if problems:
        raise output.fail("; ".join(problems))


@app.command()
def export(
    checkpoint: CheckpointPath,
    target: Annotated[Path, _path_argument("TARGET", "Directory (dcp, deepspeed) or file to write.")],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Default: by TARGET's suffix (.safetensors; .pt, .pth, .bin, .ckpt); dcp without one."
        ),
    ] = None,
    layers: Annotated[
        Layers, typer.Option("--refinement", help="Refinement layer: where kept; or fail without; or base layer alone.")
    ] = Layers.auto,
    part: Annotated[
        str | None, typer.Option("--part", help="Only what is below this key, such as model, by names without it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option(
            "--allow-pickle", help="torch, deepspeed: unpickle objects of any class. Can run the writer's code."
        )
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert to a plain DCP directory, a torch.save file, safetensors or a tag of DeepSpeed, in one process."""
    export_command.run(checkpoint, target, form, layers, part, overwrite, allow_pickle, as_json)


@app.command()
def compress(
    source: Annotated[
        Path, _path_argument(
            "IN", "safetensors (file, index or directory), torch.save file, dsq_ckpt checkpoint, or a DCP "
                  "directory, which torch unpickles: trusted only."
        )
    ],
    target: Annotated[
        Path, _path_argument("OUT", "Checkpoint directory to write; with --explore: the directory of several.")
    ],
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE|PRESET", help="JSON or YAML file, or name of a preset.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="NAME", help="Whose defaults: dsq, or one it is compared with.")
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option(
            "--evaluate", metavar="MODULE:FUNCTION",
            help="Called once; returns the model and a function that gives its metric (lower is better).",
        )
    ] = None,
    max_degradation: Annotated[
        float | None, typer.Option(
            "--max-degradation", help="The smallest whose metric is worse by no more than this: 0.01 is 1 %."
        )
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="One checkpoint within each of several bounds, to choose from.")
    ] = False,
    bounds: Annotated[
        str | None, typer.Option("--bounds", metavar="X,Y", help="The bounds of --explore. Default: 10 to 0.1 %.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(
            "--plot", metavar="FILE", help="Draw the size against the degradation of --explore (.png, .svg or .pdf)."
        )
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at OUT.")] = False,
    mpi: Annotated[
        bool | None,
        typer.Option("--mpi/--no-mpi", help="With all processes of an MPI job. Default: if mpirun started several."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compress one checkpoint that somebody wrote, by itself; within a quality bound, or within several to choose from.

    `mpirun -n 8 dsq compress IN OUT` does it with 8 processes, and stores the same values.
    """
    from dsq_ckpt.cli import compress_command, explore_command

    if explore:
        explore_command.run(
            source, target, evaluate, bounds, max_degradation, config, system, overwrite, plot, mpi, as_json
        )
    elif bounds is not None or plot is not None:
        raise output.fail("--bounds and --plot are for --explore")
    else:
        compress_command.run(source, target, config, system, evaluate, max_degradation, overwrite, as_json, mpi)


@app.command()
def merge(
    checkpoint: CheckpointPath,
    target: Annotated[Path, _path_argument("TARGET", "Checkpoint directory to make.")],
    keyframe: Annotated[
        bool, typer.Option("--keyframe", help="Write a keyframe, which needs no file of another checkpoint.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Merge a chain of deltas into one, or differences of values into few, with the same values; CHECKPOINT stays."""
    from dsq_ckpt.cli import merge_command

    merge_command.run(checkpoint, target, keyframe, as_json)


@app.command()
def gc(
    path: EitherPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, delete nothing.")] = False,
    older_than: Annotated[
        float, typer.Option(
            "--older-than", parser=output.parse_age, metavar="AGE",
            help="Leave younger files, as of a save under way: 90s, 15m, 2h, 3d.",
        ),
    ] = "1h",  # type: ignore[assignment]
    as_json: Json = False,
) -> None:
    """Delete what interrupted saves, copies and exports left behind; say what is left, and why."""
    from dsq_ckpt.cli import gc_command

    gc_command.run(path, dry_run, older_than, as_json)


@app.command()
def rm(
    checkpoints: Annotated[list[Path], _path_argument("CHECKPOINT...", "Checkpoints to remove.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints; files that others of the run need stay, and all other checkpoints load as before."""
    from dsq_ckpt.cli import rm_command

    rm_command.run(checkpoints, dry_run, as_json)


@app.command()
def cp(
    source: Annotated[Path, _path_argument("SRC", "A checkpoint, or the directory of a run.")],
    target: Annotated[Path, _path_argument("DST", "The directory to make; it must not exist.")],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint, or a run with its hard links; every checksum is verified, and DST appears complete or not.

    From and to URLs: the checkpoints of a run and the files beside them; no other directories, and no file twice.
    """
    from dsq_ckpt.cli import cp_command

    cp_command.run(source, target, as_json)


@app.command()
def warmup(as_json: Json = False) -> None:
    """Compile all kernels for this kind of CPU and keep them in files, as when a container image is built."""
    from dsq_ckpt.cli import warmup_command

    warmup_command.run(as_json)


@app.command()
def bench(
    parameters: Annotated[float, typer.Option(min=1, help="Elements of the made-up model.")] = 100e6,
    threads: Annotated[int, typer.Option(min=0, help="Worker threads; 0: as a save of one rank would choose.")] = 0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", parser=expand_path, metavar="PATH", help="Where to write; default: a temporary directory."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement.")] = 5,
    stall: Annotated[bool, typer.Option("--stall", help="Only how long training waits for async_save.")] = False,
    json_file: Annotated[Path | None, typer.Option(
        "--json", parser=expand_path, metavar="PATH", help="Write the result to this file too."
    )] = None,
) -> None:
    """Measure saving and loading on this machine."""
    from dsq_ckpt.cli import benchmark

    bench_directory = directory or Path(tempfile.gettempdir())
    with output.meter("measuring", hidden=json_file is not None):
        result = benchmark.run_bench(int(parameters), threads, bench_directory, repeats=repeats, stall_only=stall)
    benchmark.print_bench(result, output.console())
    if json_file is not None:
        json_files.write(json_file, result)


def main() -> None:
    """Run the console script."""
    app(prog_name="dsq")
