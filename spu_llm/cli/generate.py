"""`spu-llm generate`: text from one prompt, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UserError
from ..experiment.runner import measure
from ..experiment.schema import CONFIGS, DISCLOSURES, build_experiment, load_model
from .options import model_option, protocol_option, quiet_option, ring_option, soal_option
from .streaming import beside_text, stream
from .summary import summary


@click.command("generate")
@model_option
@click.option("--prompt", required=True, help="The client's secret text.")
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="New tokens, at most.")
@click.option(
    "--ops",
    type=click.Choice(["plugin", "generic", "stock"]),
    help="Whose operations; generic: SPU's, with narrowed functions.  [default: plugin with SEMI2K if the model has a calibration "
    "text, else stock]",
)
@protocol_option
@ring_option
@click.option("--fraction-bits", default=18, show_default=True, help="Fraction bits of the fixed-point format.")
@click.option("--network", default="none", show_default=True, help="Name in configs/network: what times are given for.")
@click.option("--material", type=click.Path(path_type=Path), help="Folder that `spu-llm deal` made for this generation.")
@soal_option
@click.option("--capacity", type=click.IntRange(2), help="Cache rows.  [default: what prefix, prompt and new tokens need]")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, help="Draw from the k best tokens only.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the least set of tokens of this mass.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the client's draws, to repeat them.  [default: a secret one]")
@click.option("--draft", help="Draft by this public model (name or YAML) or by `lookup`, and verify in one pass (POST).")
@click.option("--draft-length", help="Drafted tokens a pass, or auto.  [default: auto]")
@click.option("--disclosure", type=click.Choice(DISCLOSURES), help="What a pass opens.  [default: distribution]")
@click.option(
    "--sparsity", help="Compute predicted heads and neurons only: a file of `spu-llm prepare comet`, or its name (Comet)."
)
@click.option("--renew", help="Tokens that a secret order of neurons serves: token, a number, or request.  [default: token]")
@quiet_option
def generate_command(prompt: str, tokens: int, quiet: bool, **options: Any) -> None:
    """Generate text privately, streaming it to standard output; the cost goes to standard error.

    \b
    Examples:
      spu-llm generate --prompt "The capital of France is" --tokens 8
      spu-llm generate --prompt "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 7 --network wan
      spu-llm generate --prompt "One, two, three, one, two," --draft lookup --network wan
      spu-llm generate --model kjv-relu --prompt "And it came to pass" --sparsity kjv-relu --renew 64
    """
    raw = {
        "model": options["model"],
        "ops": options["ops"] or _usual_ops(options["model"], options["protocol"], options["soal"]),
        "network": options["network"],
        "material": options["material"],
        "soal": options["soal"],
        "protocol": {"name": options["protocol"], "ring": options["ring"], "fraction_bits": options["fraction_bits"]},
        "generation": {
            "prompt": prompt,
            "new_tokens": tokens,
            "capacity": options["capacity"],
            "sampling": {key: options[key] for key in ("temperature", "top_k", "top_p", "seed")},
        },
    }
    given = {key: options[key] for key in ("draft_length", "disclosure") if options[key] is not None}
    if options["draft"] is not None:
        raw["decoding"] = {"draft_model": options["draft"], **given}
    elif given:
        raise UserError(f"--{next(iter(given)).replace('_', '-')}: says how drafts are verified; add --draft, or leave it out")
    if options["sparsity"] is not None:
        raw["sparsity"] = {"file": options["sparsity"]}
    if options["renew"] is not None and options["sparsity"] is None:
        raise UserError("--renew: says how long an order of neurons serves; add --sparsity, or leave it out")
    if options["renew"] is not None:
        raw["sparsity"]["renew"] = int(options["renew"]) if options["renew"].isdecimal() else options["renew"]
    experiment = build_experiment(raw, CONFIGS, "command line").main
    metrics = measure(experiment, beside_text(quiet), stream)
    click.echo()
    click.echo(summary(metrics), err=True)


def _usual_ops(model: str, protocol: str, soal: Path | None) -> str:
    return "plugin" if protocol == "SEMI2K" and (soal or load_model(model).calibration) else "stock"
