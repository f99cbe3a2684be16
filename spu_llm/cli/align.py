"""`spu-llm align`: the model owner's offline step for POST."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..experiment.files import make_folder, write_whole
from ..experiment.schema import load_model
from ..post.align import AlignConfig, align
from ..progress import bar, silent
from .options import quiet_option


class _TopK(click.ParamType):
    """A number of tokens, or "full" (given as None)."""

    name = "K|full"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "full":
            return None
        try:
            if int(value) >= 1:
                return int(value)
        except ValueError:
            pass
        self.fail(f"{value!r}: give a number from 1, or full", param, ctx)


@click.command("align")
@click.option("--target", default="smollm2", show_default=True, help="The private model: name in configs/model, or its YAML.")
@click.option("--draft", required=True, help="The public model, likewise.")
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(path_type=Path), help="Public text file; repeated.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the aligned draft and report.json.")
@click.option(
    "--top-k", default="32", show_default=True, type=_TopK(), help="Tokens kept of each position's probabilities, or full."
)
@click.option("--steps", default=AlignConfig.steps, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=AlignConfig.batch, show_default=True, type=click.IntRange(1), help="Sequences of a step.")
@click.option("--length", default=AlignConfig.length, show_default=True, type=click.IntRange(2), help="Tokens of a sequence.")
@click.option(
    "--rate", default=AlignConfig.rate, show_default=True, type=click.FloatRange(0, 1, True), help="Largest learning rate."
)
@click.option("--keep-table", is_flag=True, help="Leave the draft's embedding as it is: cheaper, where it is the target's.")
@click.option("--learn", type=click.IntRange(1), help="Tokens of the text to learn from, at most.  [default: all]")
@click.option("--held-out", default=AlignConfig.held_out, show_default=True, type=click.IntRange(1), help="Tokens to measure on.")
@click.option("--seed", default=0, show_default=True, help="Of the sequences' order.")
@quiet_option
def align_command(target: str, draft: str, texts: tuple[Path, ...], out: Path, quiet: bool, **settings: Any) -> None:
    """Teach a public draft model a private one's probabilities on public text, so that more of its tokens are accepted.

    The model's owner runs this, having both. The draft that comes out (OUT/draft.yaml names it for `draft_model`) is meant for
    clients and tells them the target's tendencies on that text; OUT/teacher, the target's probabilities, is the owner's
    secret. A run that broke off goes on where it was.

    \b
    Examples:
      spu-llm align --target smollm2 --draft small.yaml --text public.txt --out aligned
      spu-llm align --target mine.yaml --draft smollm2 --text a.txt --text b.txt --top-k full --steps 50 --out aligned
    """
    make_folder(out)
    report = align(load_model(target), load_model(draft), texts, AlignConfig(**settings), out, silent if quiet else bar)
    write_whole(out / "report.json", json.dumps(report, indent=1) + "\n")
    prefix = list(load_model(target).prefix)
    write_whole(out / "draft.yaml", f"name: {draft_name(report)}\npath: model\nprefix: {prefix}\n")
    click.echo(summary(report))
    click.echo(f"{out / 'draft.yaml'}\n{out / 'report.json'}", err=True)


def draft_name(report: dict[str, Any]) -> str:
    return json.dumps(f"{report['draft']}-for-{report['target']}")


def summary(report: dict[str, Any]) -> str:
    """The report as a few lines."""
    lines = [f"{'':8} accepted  same best token  tokens a round with 4, 8, 16 drafted  perplexity"]
    for name in ("before", "after"):
        found = report["acceptance"][name]
        rounds = ", ".join(f"{tokens:.2f}" for tokens in found["tokens_per_round"].values())
        lines.append(f"{name:8} {found['rate']:8.1%}  {found['agreement']:15.1%}  {rounds:>37}  {found['draft_perplexity']:10.2f}")
    seconds = report["seconds"]
    lines.append(
        f"{seconds['teacher']:.0f} s for the teacher's probabilities, {seconds['training']:.0f} s for {report['config']['steps']} "
        f"steps on {report['cores']} cores, {report['peak_rss_bytes'] / 1e9:.1f} GB"
    )
    return "\n".join(lines)
