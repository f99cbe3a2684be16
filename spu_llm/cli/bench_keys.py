"""`spu-llm bench keys`: what is dealt for prompts, counted."""

from __future__ import annotations

import json

import click

from ..bench.keys import bench_keys
from ..errors import UserError
from ..progress import bar, silent
from .bench_prompt import SHAPES, shape_option
from .options import json_option, quiet_option


@click.command("keys")
@shape_option
@click.option("--tokens", "lengths", multiple=True, type=click.IntRange(2), help="Length of a prompt; twice or more.")
@click.option("--layers", default=12, show_default=True, type=click.IntRange(1), help="Layers of the model.")
@json_option
@quiet_option
def keys_command(shape: str, lengths: tuple[int, ...], layers: int, as_json: bool, quiet: bool) -> None:
    """What the dealer sends for a prompt, counted without running it: keys of tables and all of it, to the party that gets more.

    \b
    Example:
      spu-llm bench keys --tokens 64 --tokens 128 --tokens 512
    """
    if len(set(lengths)) < 2:
        raise UserError(f"--tokens {' '.join(map(str, lengths)) or 'missing'}: give two lengths or more, such as 64 and 512")
    found = bench_keys(SHAPES[shape], sorted(set(lengths)), layers, silent if quiet else bar)
    if as_json:
        click.echo(json.dumps({"shape": shape, **found}))
        return
    click.echo(f"{'tokens':>8}{'layer MB':>12}{'of it keys':>12}{'model GB':>12}")
    for prompt in found["prompts"]:
        sizes = (prompt["total"] / 1e6, prompt["lookup"] / 1e6, prompt["model_bytes"] / 1e9)
        click.echo(f"{prompt['tokens']:8}" + "".join(f"{size:12.1f}" for size in sizes))
