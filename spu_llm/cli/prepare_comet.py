"""`spu-llm prepare comet`: the model owner's offline step for sparse runs."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import click

from ..comet.prepare import Rule, default_path, prepare
from ..comet.prepared import Prepared
from ..experiment.schema import load_model
from ..progress import bar, silent
from .options import quiet_option


@click.command("comet")
@click.option("--model", default="kjv-relu", show_default=True, help="Name in configs/model, or path of a model's YAML; an OPT.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Public text; repeated.  [default: the model's calibration]",
)
@click.option("--blocks", default=Rule.blocks, show_default=True, type=click.IntRange(1), help="Blocks of a layer's neurons.")
@click.option("--rank", default=Rule.rank, show_default=True, type=click.IntRange(1), help="Inner width of the predictors.")
@click.option(
    "--recall", default=Rule.recall, show_default=True, type=click.FloatRange(0, 1, True), help="Neurons' mass to be computed."
)
@click.option(
    "--neuron-recall", default=Rule.neuron_recall, show_default=True, type=click.FloatRange(0, 1, True),
    help="Firing neurons to be computed.",
)  # fmt: skip
@click.option(
    "--head-recall", default=Rule.head_recall, show_default=True, type=click.FloatRange(0, 1, True),
    help="Heads' mass to be computed; 1 skips no head.",
)  # fmt: skip
@click.option(
    "--sizes", default=Rule.sizes, show_default=True, type=click.IntRange(1), help="Different numbers of blocks, at most."
)
@click.option("--length", default=Rule.length, show_default=True, type=click.IntRange(2), help="Tokens of a sequence.")
@click.option("--tokens", default=Rule.tokens, show_default=True, type=click.IntRange(1), help="Tokens of the text, at most.")
@click.option("--seed", default=Rule.seed, show_default=True, type=click.IntRange(0), help="Of what is drawn.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: one in the cache folder]")
@click.option("--fresh", is_flag=True, help="Begin anew, whatever was kept of an earlier run.")
@quiet_option
def comet_command(model: str, texts: tuple[Path, ...], out: Path | None, quiet: bool, **settings: Any) -> None:
    """Cluster a ReLU model's neurons into blocks and train what predicts the blocks and heads a token needs; write one file.

    The file is the owner's secret, as the model is; `sparsity:` names it in a run's YAML. More text than the model's calibration
    makes better predictors. Finished layers are kept in the cache folder, so a run that broke off goes on where it was.

    \b
    Examples:
      spu-llm prepare comet --model kjv-relu --text public.txt --out kjv-relu.comet
      spu-llm prepare comet --model mine.yaml --text a.txt --text b.txt --recall 0.97 --head-recall 1
    """
    begun = time.perf_counter()
    prepared = prepare(load_model(model), texts, Rule(**settings), silent if quiet else bar)
    path = out or default_path(prepared)
    prepared.save(path)
    click.echo(summary(prepared))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    click.echo(f"seconds    {time.perf_counter() - begun:.0f}, memory {memory / 1e9:.1f} GB")
    click.echo(f"file       {path} (the owner's secret)")


def summary(prepared: Prepared) -> str:
    """A line a layer: what is computed, and what that holds of text that was not learned from."""
    lines = [f"{'layer':>5}{'zeros':>8}{'blocks':>10}{'recall':>8}{'oracle':>8}{'neurons':>9}{'heads':>8}{'recall':>8}"]
    for i, layer in enumerate(prepared.layers):
        found, last = layer.measured, layer.active_blocks - 1
        if found is None:
            continue
        heads = f"{layer.active_heads:>8}{found.head_recall:8.1%}"
        blocks = f"{layer.active_blocks} of {layer.blocks}"
        lines.append(
            f"{i:5}{found.zeros:8.1%}{blocks:>10}{found.recall:8.1%}{found.oracle[last]:8.1%}{found.neuron_recall:9.1%}{heads}"
        )
    return "\n".join(lines)
