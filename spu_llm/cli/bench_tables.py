"""`spu-llm bench tables`: which lookup tables a model's ranges choose."""

from __future__ import annotations

import json

import click

from ..bench.tables import bench_tables
from ..experiment.schema import load_model
from ..models import load_checkpoint
from ..models.calibration_file import calibration_for
from ..progress import bar, silent
from .options import json_option, model_option, quiet_option


@click.command("tables")
@model_option
@click.option("--context", default=64, show_default=True, type=click.IntRange(0), help="Positions in the cache.")
@json_option
@quiet_option
def tables_command(model: str, context: int, as_json: bool, quiet: bool) -> None:
    """Which lookup tables each layer's measured ranges choose, and what that saves of keys and expansion.

    \b
    Example:
      spu-llm bench tables --model smollm2 --context 512
    """
    config = load_model(model)
    checkpoint = load_checkpoint(config.locate())
    calibration, _ = calibration_for(config, checkpoint, silent if quiet else bar)
    found = bench_tables(checkpoint.decoder.config, calibration, context)
    if as_json:
        click.echo(json.dumps({"model": model, **found}))
        return
    for i, sizes in enumerate(found["sizes"]):
        click.echo(f"layer {i:3}  " + "  ".join(f"{name} {size}" for name, size in sizes.items()))
    for name in ("layers", "each", "joined", "widest"):
        click.echo(f"{name:8} {found[name]['key_bytes'] / 1e6:8.2f} MB of keys, {found[name]['words'] / 1e6:8.2f} M words a token")
