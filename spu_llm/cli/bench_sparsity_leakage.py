"""`spu-llm bench sparsity-leakage`: what the masks that a sparse run reveals tell whoever sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..bench.sparsity_leakage import Amounts, bench_leakage
from ..comet.prepared import Prepared
from ..errors import UserError
from ..experiment.schema import load_model
from ..models import load_checkpoint
from ..models.source import content_digest
from ..models.tokenizer import need_tokenizer
from ..post.align import read_tokens
from ..progress import bar, silent
from .options import json_option, quiet_option

_VICTIMS = 5  # the last part of the text, one token in so many, where no victims' text is given
_RATES = {
    "token": "token",
    "after": "after known",
    "block": "block",
    "head": "head",
    "repeated": "repeats",
    "pair": "1 of 2",
    "among": "1 of all",
    "part_among": "in part",
    "word": "1 word",
}


@click.command("sparsity-leakage")
@click.option("--comet", required=True, type=click.Path(path_type=Path), help="The model's file from `spu-llm prepare comet`.")
@click.option("--model", required=True, help="Name in configs/model, or path of a model's YAML.")
@click.option("--text", required=True, type=click.Path(path_type=Path), help="Public text, from which the observer learns.")
@click.option("--victims", type=click.Path(path_type=Path), help="Text of clients.  [default: the last fifth of --text]")
@click.option("--length", default=128, show_default=True, type=click.IntRange(2), help="Tokens of a request.")
@click.option("--requests", default=48, show_default=True, type=click.IntRange(8), help="Of clients, at most.")
@click.option("--public", default=16384, show_default=True, type=click.IntRange(1), help="Public tokens, at most.")
@click.option("--heads", type=click.IntRange(1), help="Heads of a layer that are computed.  [default: as the file says]")
@click.option("--seed", default=0, show_default=True, help="Of shuffles, ties and intervals.")
@json_option
@quiet_option
def sparsity_leakage_command(
    comet: Path, model: str, text: Path, victims: Path | None, length: int, requests: int, public: int, heads: int | None,
    seed: int, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Attacks on the revealed block masks: tokens from counts, blocks from firing frequency, guessed prompts from overlaps.

    For every setting: how many blocks are computed, how often the shuffle is renewed, whether heads' masks are revealed too. Each
    rate is printed over what guessing gives; one that stands in brackets is not told from it (95%, over requests).

    \b
    Example:
      spu-llm bench sparsity-leakage --comet kjv-relu.safetensors --model kjv-relu --text public.txt --json
    """
    config = load_model(model)
    place = config.locate()
    checkpoint = load_checkpoint(place)
    need_tokenizer(checkpoint.tokenizer, config)
    prepared = Prepared.load(comet)
    prepared.check(comet, checkpoint.decoder.config, content_digest(place))
    if heads is not None:
        prepared = _with_heads(prepared, heads, checkpoint.decoder.config.heads)
    read = read_tokens([text], checkpoint)
    cut = len(read) - len(read) // _VICTIMS
    texts = (read[:cut], read[cut:]) if victims is None else (read, read_tokens([victims], checkpoint))
    amounts = Amounts(length, requests, public, seed)
    found = bench_leakage(checkpoint.decoder, config.prefix, prepared, texts, amounts, silent if quiet else bar)
    found = {"model": config.name, "digest": prepared.digest, **found}
    click.echo(json.dumps(found) if as_json else _table(found))


def _with_heads(prepared: Prepared, heads: int, every: int) -> Prepared:
    """The same with `heads` computed in each layer that has a predictor of them."""
    if heads > every or all(layer.heads is None for layer in prepared.layers):
        raise UserError(
            f"--heads {heads}: the model has {every}, and the file must have predictors of them; give fewer, or leave it out"
        )
    return replace(prepared, layers=tuple(replace(layer, active_heads=heads) for layer in prepared.layers))


def _table(found: dict[str, Any]) -> str:
    lines = [f"{'count':9}{'heads':>6}{'period':>9}{'renewed':>8}" + "".join(f"{label:>11}" for label in _RATES.values())]
    for row in found["rows"]:
        period = "request" if row["period"] is None else str(row["period"])
        head = f"{row['count']:9}{'yes' if row['heads'] else 'no':>6}{period:>9}{row['renewed_share']:8.0%}"
        lines.append(head + "".join(f"{_rate(row[name]):>11}" for name in _RATES))
    usual = {name: next((row[name]["baseline"] for row in found["rows"] if row[name]), np.nan) for name in _RATES}
    lines.append(f"{'guessing':32}" + "".join(f"{value:11.1%}" for value in usual.values()))
    counts = f"{found['texts']} requests of {found['tokens']} tokens, {found['layers']} layers of {found['blocks']} blocks"
    return "\n".join([*lines, f"{counts}; the observer learned from {found['public_tokens']} public tokens"])


def _rate(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "-"
    return f"{rate['rate']:.1%}" if rate["low"] > 0 else f"({rate['rate']:.1%})"
