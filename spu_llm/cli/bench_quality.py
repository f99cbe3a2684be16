"""`spu-llm bench quality`: perplexity, last words and multiple choice."""

from __future__ import annotations

from pathlib import Path

import click

from ..bench.quality import Amounts, bench_quality, summary
from ..experiment.schema import load_model
from ..models import load_checkpoint
from ..progress import bar, silent
from .options import model_option, quiet_option


@click.command("quality")
@model_option
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(path_type=Path), help="A passage a line; repeated.")
@click.option("--questions", "asked", multiple=True, type=click.Path(path_type=Path), help="A question a line; repeated.")
@click.option("--tokens", default=2000, show_default=True, type=click.IntRange(1), help="Tokens of each text, at least.")
@click.option("--words", default=100, show_default=True, type=click.IntRange(0), help="Last words of each text, at least.")
@click.option("--choices", default=100, show_default=True, type=click.IntRange(0), help="Choices of each text, at most.")
@click.option("--ask", default=100, show_default=True, type=click.IntRange(0), help="Questions of each file, at most.")
@click.option("--check", default=6, show_default=True, type=click.IntRange(1), help="Tokens to run between parties too.")
@click.option("--seed", default=0, show_default=True, help="Of the choices' options and the emulated masks.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON file for the result.")
@quiet_option
def quality_command(model: str, texts: tuple[Path, ...], asked: tuple[Path, ...], out: Path, quiet: bool, **amounts: int) -> None:
    """Perplexity, last words and multiple choice: plaintext against the secure run, which is emulated bit by bit.

    A choice: which of four ends goes with the first 32 tokens of a passage. A line of --questions:
    {"options": [["context", " continuation"], ...], "answer": 0}. A run that broke off goes on where it was.

    \b
    Example:
      spu-llm bench quality --text brown.txt --text king_james.txt --tokens 2000 --out quality.json
    """
    config = load_model(model)
    counts = Amounts(
        amounts["tokens"], amounts["words"], amounts["choices"], amounts["ask"], checked=amounts["check"], seed=amounts["seed"]
    )
    found = bench_quality(config, load_checkpoint(config.locate()), texts, asked, counts, out, silent if quiet else bar)
    click.echo(summary(found))
    click.echo(out, err=True)
