"""`spu-llm run`: an experiment that a YAML file describes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..experiment.files import write_whole
from ..experiment.report import render_report
from ..experiment.runner import run_experiment
from ..experiment.schema import load_experiment
from .options import quiet_option, set_option, soal_option
from .streaming import beside_text, stream
from .summary import summary


@click.command("run")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for metrics.json and report.html.")
@set_option
@soal_option
@quiet_option
def run_command(config: Path, out: Path, overrides: tuple[str, ...], soal: Path | None, quiet: bool) -> None:
    """Run the experiment described by the YAML file CONFIG (with its baseline and variants), writing metrics and a report.

    A run that was finished in the same folder under the same settings is not repeated.

    \b
    Examples:
      spu-llm run configs/experiment/quickstart.yaml --out results/quickstart
      spu-llm run configs/experiment/quickstart.yaml --out results/wan --set network=wan --set generation.new_tokens=4
    """
    if soal is not None:
        overrides = (*overrides, f"soal={json.dumps(str(soal))}")
    metrics = run_experiment(load_experiment(config, overrides), out, beside_text(quiet), stream)
    write_whole(out / "report.html", render_report(metrics))
    click.echo()
    click.echo(summary(metrics), err=True)
    click.echo(f"{out / 'metrics.json'}\n{out / 'report.html'}", err=True)
