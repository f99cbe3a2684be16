"""`spu-llm bench passes`: how the cost of a pass grows with its positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..bench.passes import bench_passes
from ..errors import UserError
from ..experiment.schema import load_model, load_network
from ..models import load_checkpoint
from ..models.tokenizer import need_tokenizer
from ..progress import bar, silent
from .options import json_option, model_option, numbers, quiet_option, repeats_option

_NETWORKS = ("lan", "wan")


@click.command("passes")
@model_option
@click.option("--text", required=True, type=click.Path(path_type=Path), help="Text file whose beginning is scored.")
@click.option("--positions", default="1,4,9,17", show_default=True, help="Sizes of passes.")
@click.option("--context", default=64, show_default=True, type=click.IntRange(1), help="Tokens in the cache before a pass.")
@repeats_option
@json_option
@quiet_option
def passes_command(model: str, text: Path, positions: str, context: int, repeats: int, as_json: bool, quiet: bool) -> None:
    """Passes of several tokens with all their logits, on the plugin's protocols: compute, traffic, dealing, seconds on lan and wan.

    \b
    Examples:
      spu-llm bench passes --text experiments/plugin/brown.txt
      spu-llm bench passes --text experiments/plugin/brown.txt --positions 1,9 --context 256 --json
    """
    sizes = numbers("--positions", positions)
    config = load_model(model)
    checkpoint = load_checkpoint(config.locate())
    tokenizer = need_tokenizer(checkpoint.tokenizer, config)
    try:
        tokens = tokenizer.encode(text.read_text().replace("\n", " "))[: context + max(sizes)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: cannot be read ({error}); give a text file") from None
    if len(tokens) < context + max(sizes):
        raise UserError(f"--text {text}: has {len(tokens)} tokens, fewer than {context + max(sizes)}; give a longer one")
    networks = [load_network(name) for name in _NETWORKS]
    found = bench_passes(config, checkpoint, tokens, sizes, networks, repeats, silent if quiet else bar)
    click.echo(json.dumps(found) if as_json else _table(found))


def _table(found: dict[str, Any]) -> str:
    heads = ("positions", "compute s", "messages", "MB", "dealt MB", "lan s", "wan s", "lan growth", "wan growth")
    lines = ["".join(f"{head:>11}" for head in heads)]
    for row in found["rows"]:
        growth, sizes = row["growth"], (row["bytes"] / 1e6, row["dealer_bytes"] / 1e6)
        costs = (row["seconds"], row["messages"], *sizes, row["lan"], row["wan"], growth["lan"], growth["wan"])
        lines.append(
            f"{row['positions']:11}" + "".join(f"{cost:11.2f}" if isinstance(cost, float) else f"{cost:11}" for cost in costs)
        )
    return "\n".join([*lines, f"trust: {found['trust']}"])
