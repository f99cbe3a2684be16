"""`spu-llm bench accuracy`: the plugin's next tokens against plaintext's, over a text."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..bench.accuracy import bench_accuracy
from ..errors import UserError
from ..experiment.schema import load_model
from ..models import load_checkpoint
from ..progress import bar, silent
from .options import json_option, model_option, quiet_option


@click.command("accuracy")
@model_option
@click.option("--text", required=True, type=click.Path(path_type=Path), help="Text file, one passage a line.")
@click.option("--positions", default=200, show_default=True, type=click.IntRange(1), help="Next tokens to compare.")
@json_option
@quiet_option
def accuracy_command(model: str, text: Path, positions: int, as_json: bool, quiet: bool) -> None:
    """How often the plugin's next token is plaintext's, over real text.

    \b
    Example:
      spu-llm bench accuracy --text experiments/plugin/brown.txt --positions 200 --json
    """
    try:
        passages = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: cannot be read ({error}); give a text file") from None
    config = load_model(model)
    result = bench_accuracy(config, load_checkpoint(config.locate()), passages, positions, silent if quiet else bar)
    click.echo(json.dumps(result) if as_json else "\n".join(f"{key:20} {value}" for key, value in result.items()))
