"""`spu-llm prepare soal`: the model owner's offline step."""

from __future__ import annotations

from pathlib import Path

import click

from ..experiment.schema import load_model
from ..progress import bar, silent
from ..soal.prepare import Rule, default_path, prepare
from ..soal.prepared import save_prepared
from ..soal.report import lines, write_report, writer
from .options import model_option, quiet_option


@click.command("soal")
@model_option
@click.option("--text", type=click.Path(path_type=Path), help="A passage a line.  [default: the model's calibration]")
@click.option("--eta", default=8.0, show_default=True, type=click.FloatRange(1, min_open=True), help="Medians of an outlier.")
@click.option("--longest", default=4, show_default=True, type=click.IntRange(0), help="Tokens of a prefix, at most.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: one in the cache folder]")
@click.option("--report", "reports", multiple=True, type=click.Path(path_type=Path), help=".html, .json or .png; repeated.")
@click.option("--fresh", is_flag=True, help="Measure all anew, whatever was kept of earlier runs.")
@quiet_option
def soal_command(
    model: str, text: Path | None, eta: float, longest: int, out: Path | None, reports: tuple[Path, ...], fresh: bool, quiet: bool
) -> None:
    """Find a prefix that takes the model's outliers, measure ranges and references after it, and write one file.

    The file is the owner's secret, as the model is; `--soal FILE` gives it to a run. What was measured is kept in the cache
    folder, so a run that broke off goes on where it was. A prefix in the model's config is measured beside those tried.

    \b
    Examples:
      spu-llm prepare soal --model smollm2 --out smollm2.soal --report smollm2.html
      spu-llm generate --model smollm2 --soal smollm2.soal --prompt "The capital of France is" --tokens 4
    """
    config = load_model(model)
    if text is not None:
        config = config.model_copy(update={"calibration": text})
    for report in reports:
        writer(report)  # a kind that there is not shows before minutes of work
    rule = Rule(eta, longest, fresh)
    prepared = prepare(config, rule, silent if quiet else bar)
    path = out or default_path(config, rule)
    save_prepared(prepared, path)
    click.echo(lines(prepared))
    click.echo(f"file       {path} (the owner's secret)")
    for report in reports:
        write_report(prepared, report)
        click.echo(f"report     {report}")
