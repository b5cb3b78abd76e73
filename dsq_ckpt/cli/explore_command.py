"""`dsq compress --explore`: compression within several quality bounds, with a table and a plot of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.api.exploring import BOUNDS, Tradeoff, explore
from dsq_ckpt.cli import output
from dsq_ckpt.cli.compress_command import load_configuration
from dsq_ckpt.cli.metric_loader import load_metric
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.atomic_io import create_file


def run(
    source: Path, target: Path, evaluate: str | None, bounds: str | None, max_degradation: float | None,
    config: str | None, system: str | None, overwrite: bool, plot: Path | None, mpi: bool | None, as_json: bool,
) -> None:
    """Compress within each bound, and print size and degradation of each result.

    Args:
        evaluate: MODULE:FUNCTION, see `load_metric`.
        bounds: numbers separated by commas; None for `BOUNDS`.
        plot: file of the plot; None for no plot.

    Raises:
        DSQError: see `dsq_ckpt.explore`; options contradict each other; or matplotlib is not installed.
    """
    if evaluate is None:
        raise ConfigError("--explore needs --evaluate MODULE:FUNCTION: what returns the model and its metric")
    if max_degradation is not None:
        raise ConfigError("--max-degradation is for one checkpoint; with --explore, give --bounds")
    if mpi:
        raise ConfigError("--explore is for one process: leave --mpi out")
    try:
        parsed = BOUNDS if bounds is None else [float(bound) for bound in bounds.split(",")]
    except ValueError:
        raise ConfigError(f"--bounds is '{bounds}'; expected numbers with commas between them: 0.1,0.01") from None
    if plot is not None:
        _check_plot(plot, overwrite)
    model, metric = load_metric(evaluate)
    with output.meter("compressing", hidden=as_json):
        results = explore(
            source, target, evaluate=metric, bounds=parsed, config=load_configuration(config, system),
            model=model, overwrite=overwrite,
        )
    if as_json:
        output.print_json({"source": str(source), "checkpoints": [
            {**result._asdict(), "path": str(result.path),
             "ratio_kept": output.quotient(result.bytes_logical, result.bytes_kept)}
            for result in results
        ]})
    else:
        _print_table(results)
    if plot is not None:
        _draw_plot(results, plot)


def _print_table(results: Sequence[Tradeoff]) -> None:
    table = output.table("bound", "degradation", "size", "ratio", "evaluations", "took", "<", "<checkpoint")
    for result in results:
        table.add_row(
            output.percent(result.max_degradation), _format_degradation(result), output.size(result.bytes_kept),
            output.ratio(result.bytes_logical, result.bytes_kept), output.number(result.evaluations),
            output.seconds(result.seconds), "" if result.on_front else "beaten", str(result.path),
        )
    screen = output.console()
    screen.print(table)
    screen.print()
    screen.print(
        f"Uncompressed: {output.size(results[0].bytes_logical)}. Beaten: another one is smaller and degrades less."
    )
    if results[-1].exact:
        screen.print(f"No configuration keeps {output.percent(results[-1].max_degradation)}: weights are exact there.")


def _format_degradation(result: Tradeoff) -> str:
    return "unknown" if result.degradation is None else output.percent(result.degradation)


def _check_plot(plot: Path, overwrite: bool) -> None:
    """Check that a plot can be written, before searches that may take long.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib.figure  # noqa: F401  # used after the searches
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsq_ckpt[plot]'") from error
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is '{plot}'; expected a file that ends in .png, .svg or .pdf")
    if plot.is_dir() or (plot.exists() and not overwrite):
        raise ConfigError(f"--plot is '{plot}', which is there already; name another file, or --overwrite it")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot is '{plot}', but there is no directory '{plot.parent}'")


def _draw_plot(results: Sequence[Tradeoff], plot: Path) -> None:
    """Plot the ratio against the degradation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axis = figure.subplots()
    points = [
        (100 * result.degradation, result.bytes_logical / result.bytes_kept, result)
        for result in results if result.degradation is not None
    ]
    front = sorted((x, y) for x, y, result in points if result.on_front)
    axis.plot([x for x, _ in front], [y for _, y in front], "-o", label="smallest for what they cost")
    if beaten := [(x, y) for x, y, result in points if not result.on_front]:
        axis.plot([x for x, _ in beaten], [y for _, y in beaten], "o", color="0.7", label="beaten")
    for x, y, result in points:
        if result.on_front:
            label = f"{100 * result.max_degradation:g} %"
            axis.annotate(label, (x, y), (5, -11), textcoords="offset points", fontsize=8)
    smallest = min((x for x, _, _ in points if x > 0), default=1.0)
    axis.set_xscale("symlog", linthresh=smallest)  # degradations span decades, and may be zero or negative
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="degradation of the metric (%); labels: the bound", ylabel="times smaller", ylim=(0, None))
    axis.margins(x=0.12)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    with create_file(plot) as stream:
        figure.savefig(stream, format=plot.suffix[1:], dpi=150)
