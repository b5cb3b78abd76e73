"""`dsq compress --explore`: the checkpoint within several bounds, as a table and a picture to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.api.exploring import BOUNDS, Tradeoff, explore
from dsq_ckpt.cli import output
from dsq_ckpt.cli.compressing import configuration
from dsq_ckpt.cli.evaluating import judge
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.atomic_io import create_file


def run(
    source: Path, target: Path, evaluate: str | None, bounds: str | None, max_degradation: float | None,
    config: str | None, system: str | None, overwrite: bool, plot: Path | None, mpi: bool | None, as_json: bool,
) -> None:
    """Compress within each bound, and print what each saves and costs.

    Args:
        evaluate: see `judge`.
        bounds: numbers with commas between them; None: `BOUNDS`.
        plot: a file to draw the front into; None: none.

    Raises:
        DSQError: see `dsq_ckpt.explore`; options contradict each other; or matplotlib is not there.
    """
    if evaluate is None:
        raise ConfigError("--explore needs --evaluate MODULE:FUNCTION: what returns the model and its metric")
    if max_degradation is not None:
        raise ConfigError("--max-degradation is for one checkpoint; with --explore, give --bounds")
    if mpi:
        raise ConfigError("--explore is for one process: leave --mpi out")
    try:
        chosen = BOUNDS if bounds is None else [float(part) for part in bounds.split(",")]
    except ValueError:
        raise ConfigError(f"--bounds is '{bounds}'; expected numbers with commas between them: 0.1,0.01") from None
    if plot is not None:
        _expect_plot(plot, overwrite)
    model, metric = judge(evaluate)
    with output.meter("compressing", hidden=as_json):
        found = explore(
            source, target, evaluate=metric, bounds=chosen, config=configuration(config, system),
            model=model, overwrite=overwrite,
        )
    if as_json:
        output.print_json({"source": str(source), "checkpoints": [
            {**one._asdict(), "path": str(one.path), "ratio_kept": output.quotient(one.bytes_logical, one.bytes_kept)}
            for one in found
        ]})
    else:
        _print(found)
    if plot is not None:
        _draw(found, plot)


def _print(found: Sequence[Tradeoff]) -> None:
    table = output.table("bound", "degradation", "size", "ratio", "evaluations", "took", "<", "<checkpoint")
    for one in found:
        table.add_row(
            output.percent(one.max_degradation), _told(one), output.size(one.bytes_kept),
            output.ratio(one.bytes_logical, one.bytes_kept), output.number(one.evaluations),
            output.seconds(one.seconds), "" if one.on_front else "beaten", str(one.path),
        )
    screen = output.console()
    screen.print(table)
    screen.print()
    screen.print(
        f"Uncompressed: {output.size(found[0].bytes_logical)}. Beaten: another one is smaller and degrades less."
    )
    if found[-1].exact:
        screen.print(f"No configuration keeps {output.percent(found[-1].max_degradation)}: weights are exact there.")


def _told(one: Tradeoff) -> str:
    return "unknown" if one.degradation is None else output.percent(one.degradation)


def _expect_plot(plot: Path, overwrite: bool) -> None:
    """Refuse what could not be drawn, before the searches, which may take long."""
    try:
        import matplotlib.figure  # noqa: F401  # used when the searches are done
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsq_ckpt[plot]'") from error
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is '{plot}'; expected a file that ends in .png, .svg or .pdf")
    if plot.is_dir() or (plot.exists() and not overwrite):
        raise ConfigError(f"--plot is '{plot}', which is there already; name another file, or --overwrite it")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot is '{plot}', but there is no directory '{plot.parent}'")


def _draw(found: Sequence[Tradeoff], plot: Path) -> None:
    """Draw size against degradation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axis = figure.subplots()
    places = [
        (100 * one.degradation, one.bytes_logical / one.bytes_kept, one) for one in found if one.degradation is not None
    ]
    front = sorted((x, y) for x, y, one in places if one.on_front)
    axis.plot([x for x, _ in front], [y for _, y in front], "-o", label="smallest for what they cost")
    if beaten := [(x, y) for x, y, one in places if not one.on_front]:
        axis.plot([x for x, _ in beaten], [y for _, y in beaten], "o", color="0.7", label="beaten")
    for x, y, one in places:
        if one.on_front:
            axis.annotate(f"{100 * one.max_degradation:g} %", (x, y), (5, -11), textcoords="offset points", fontsize=8)
    least = min((x for x, _, _ in places if x > 0), default=1.0)
    axis.set_xscale("symlog", linthresh=least)  # degradations are spread over decades, and may be zero or negative
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="degradation of the metric (%); labels: the bound", ylabel="times smaller", ylim=(0, None))
    axis.margins(x=0.12)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    with create_file(plot) as stream:
        figure.savefig(stream, format=plot.suffix[1:], dpi=150)
