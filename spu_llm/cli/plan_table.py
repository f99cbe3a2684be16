"""`spu-llm plan-table`: the cheapest lookup table of a named function within an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

from ..dealer.plan import PlannedTable, Preference, errors, plan_table
from ..errors import UserError
from ..primitives.named import MAX_ERROR, NAMED, NamedFunction
from .options import json_option


@click.command("plan-table")
@click.option("--function", "name", required=True, type=click.Choice(sorted(NAMED)), help="What the table gives.")
@click.option("--low", type=float, help="Least input.  [default: where the function's own table begins]")
@click.option("--high", type=float, help="Largest input.  [default: where the function's own range ends]")
@click.option("--error", default=MAX_ERROR, show_default=True, help="Largest error allowed, absolute.")
@click.option("--prefer", default="bytes", show_default=True, type=click.Choice(["bytes", "seconds"]), help="What is to be least.")
@json_option
@click.option("--plot", type=click.Path(path_type=Path), help="SVG file to write: the error over the range.")
def plan_table_command(
    name: str, low: float | None, high: float | None, error: float, prefer: Preference, as_json: bool, plot: Path | None
) -> None:
    """Choose segments, width and degree of a table with the fewest dealer bytes, or the fastest expansion.

    The error is that of the protocol's own integers under the worst masks that a search finds, not of the fit alone.

    \b
    Examples:
      spu-llm plan-table --function gelu --low -8 --high 8 --error 6e-4
      spu-llm plan-table --function exp --low -12 --high 0 --error 1e-4 --prefer seconds --plot exp.svg
    """
    function = NAMED[name]
    span = (function.low if low is None else low, function.high if high is None else high)
    planned = plan_table(function.numpy, *span, error, prefer, function.stock)
    if plot is not None:
        _write(plot, _figure(name, function, planned, span, error))
    found = {"function": name, "low": span[0], "high": span[1], "error": error, **_described(planned)}
    if as_json:
        click.echo(json.dumps(found))
    else:
        for key, value in found.items():
            click.echo(f"{key:20} {value:.4g}" if isinstance(value, float) else f"{key:20} {value}")


def _described(planned: PlannedTable) -> dict[str, Any]:
    table = planned.table
    return {
        "segments": table.segments,
        "width": table.width,
        "width_bits": table.width_bits,
        "factor": table.factor,
        "degree": table.degree,
        "bits": table.bits,
        "place_bits": table.place_bits,
        "continued": planned.continued,
        "usable_to": table.high,
        "key_bytes": planned.key_bytes,
        "multiply_adds": planned.multiply_adds,
        "seconds": planned.seconds,
        "max_error": planned.max_error,
    }


def _figure(name: str, function: NamedFunction, planned: PlannedTable, span: tuple[float, float], allowed: float) -> Figure:
    """The function above, and the largest error seen at each place below."""
    x, _, error = errors(planned.table, function.numpy, span, draws=4)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    value, below = figure.subplots(2, 1, sharex=True)
    value.plot(x, function.numpy(x))
    value.set_ylabel(name)
    below.plot(x, error, linewidth=0.5, rasterized=True)
    below.axhline(allowed, color="black", linestyle="--", linewidth=0.8)
    below.set_ylim(0, 1.1 * max(allowed, float(error.max())))
    below.set_ylabel("error under random masks")
    below.set_xlabel(
        f"{planned.table.segments} segments of width {planned.table.width:g}, degree {planned.table.degree}: "
        f"{planned.key_bytes:.0f} B of dealer material an element"
    )
    return figure


def _write(path: Path, figure: Figure) -> None:
    try:
        figure.savefig(path, format="svg", dpi=150)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --plot") from None
