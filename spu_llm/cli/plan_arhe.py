"""`spu-llm plan arhe`: bootstraps of a decoding step, from shapes alone."""

from __future__ import annotations

import json
from typing import Any

import click

from ..arhe.report import planned
from ..arhe.shapes import SHAPES
from .arhe_choices import checkpoint_of, chosen, listed, parameters_option, plan_options


@click.command("arhe")
@plan_options
@parameters_option("paper")
@click.option("--context", default=33, show_default=True, type=int, help="Positions that the step's token attends to.")
@click.option("--bootstrap-seconds", type=click.FloatRange(0), help="Measured time of one bootstrap, for an estimate.")
def plan_arhe_command(model: str, context: int, bootstrap_seconds: float | None, as_json: bool, **choices: Any) -> None:
    """Bootstraps of a decoding step and of a prompt, by part, with and without each optimisation; nothing is run.

    \b
    Examples:
      spu-llm plan arhe --model gpt2-small --context 33 --json
      spu-llm plan arhe --model kjv --context 64 --bootstrap-seconds 14.5
      spu-llm plan arhe --model gpt2-small --levels 7 --steep 2 --argmax tournament
    """
    config = SHAPES[model] if model in SHAPES else checkpoint_of(model).decoder.config
    found = {"model": model} | planned(config, *chosen(choices), context, bootstrap_seconds)
    click.echo(json.dumps(found) if as_json else "\n".join(listed(found)))
