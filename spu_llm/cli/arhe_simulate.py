"""`spu-llm arhe simulate`: a schedule performed on plaintext vectors."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from ..arhe.deviations import Deviations
from ..arhe.executor import decode
from ..arhe.simulator import Simulator
from ..progress import bar, silent
from .arhe_choices import decoding_options, listed, parameters_option, plan_options, requested, result_of


@click.command("simulate")
@plan_options
@parameters_option("paper")
@decoding_options
@click.option("--errors", is_flag=True, help="Compare each layer's result with exact functions.")
def simulate_command(as_json: bool, quiet: bool, errors: bool, **choices: Any) -> None:
    """Perform the schedule on plaintext vectors that keep CKKS' levels, scales and ranges, and count its bootstraps.

    A pass whose one-hot vector's squares do not sum to 1 had a second logit too near the largest: a near-tie.

    \b
    Examples:
      spu-llm arhe simulate --model kjv --prompt "And it came to pass" --tokens 8
      spu-llm arhe simulate --model gpt2-small --tokens 4 --json
      spu-llm arhe simulate --model llama-tiny --tokens 16 --no-cache --log-ring 10
    """
    began = time.perf_counter()
    request = requested(choices)
    backend = Simulator(request.schedule.parameters)
    deviations = Deviations(request.meaning, request.schedule, backend, request.prompt)
    watch = deviations.watch if errors else None
    found = decode(request.meaning, request.schedule, backend, request.prompt, request.tokens, silent if quiet else bar, watch)
    result = result_of(request, found) | {"lowest_level": backend.lowest, "seconds": time.perf_counter() - began}
    if errors:
        result["errors"] = deviations.facts()
    click.echo(json.dumps(result) if as_json else "\n".join(listed(result)))
