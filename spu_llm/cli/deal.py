"""`spu-llm deal`: a dealer's messages for one generation, written to the folders of the two parties."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UserError
from ..experiment.schema import load_model, with_prefix
from ..generation.material import AheadDealer, Facts, deal_generation
from ..models import load_checkpoint
from ..models.calibration_file import calibration_for
from ..models.published import publish
from ..models.source import content_digest
from ..progress import bar, silent
from ..soal.prepared import load_prepared
from .options import model_option, quiet_option


@click.command("deal")
@model_option
@click.option("--prompt-tokens", required=True, type=click.IntRange(1), help="Tokens of the prompt, exactly.")
@click.option("--tokens", required=True, type=click.IntRange(1), help="New tokens, at most.")
@click.option("--capacity", type=click.IntRange(2), help="Cache rows.  [default: what prefix, prompt and new tokens need]")
@click.option("--soal", type=click.Path(path_type=Path), help="The model's file from `spu-llm prepare soal`, if the run uses it.")
@click.option("--ahead", type=click.IntRange(1), help="Keep material for so many passes at most, and deal on as it is used.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="New folder; party-0 and party-1 in it go to the parties."
)
@quiet_option
def deal_command(
    model: str, prompt_tokens: int, tokens: int, capacity: int | None, soal: Path | None, ahead: int | None, out: Path, quiet: bool
) -> None:
    """Deal material for one generation ahead of time.

    The dealer needs the model's shape and tables, no weight, prompt or token. Each party's folder holds its key and its
    messages, which are deleted as they are used; the folder serves one generation, whether that ends well or not.

    \b
    Examples:
      spu-llm deal --model smollm2 --prompt-tokens 5 --tokens 16 --out material
      spu-llm deal --model smollm2 --prompt-tokens 5 --tokens 200 --ahead 8 --out material
    """
    progress = silent if quiet else bar
    config = load_model(model) if soal is None else with_prefix(load_model(model), soal)
    checkpoint = load_checkpoint(config.locate())
    needed, positions = len(config.prefix) + prompt_tokens + tokens, checkpoint.decoder.config.positions
    if not needed <= (capacity or needed) <= positions:
        raise UserError(
            f"{len(config.prefix)} tokens of prefix, {prompt_tokens} of prompt and {tokens} new ones need {needed} cache rows, and "
            f"the model has {positions} positions; correct --prompt-tokens, --tokens or --capacity"
        )
    facts = Facts(config.name, len(config.prefix), prompt_tokens, tokens, capacity or needed)
    if soal is None:
        calibration, _ = calibration_for(config, checkpoint, progress)
    else:
        calibration = load_prepared(soal, content_digest(config.locate())).calibration
    dealer = AheadDealer(publish(checkpoint.decoder.config, config.prefix, calibration), facts, out)
    deal_generation(dealer, facts, ahead, progress)
    largest = max(dealer.sent)
    click.echo(
        f"{out}: {dealer.runs} program runs dealt for {len(facts.passes)} passes; {largest / 1e6:.1f} MB to each party, "
        f"{largest / len(facts.passes) / 1e6:.2f} MB a pass; {dealer.bytes_on_disk / 1e6:.1f} MB on disk now"
    )
