"""`spu-llm bench prompt`: one decoder layer over a prompt."""

from __future__ import annotations

import json
from typing import Any

import click

from ..bench.layer import LayerShape
from ..bench.prompt import bench_prompt
from ..errors import UserError
from ..models.calibration import Reference
from ..progress import bar, silent
from ..runtime import ProtocolConfig
from .options import json_option, protocol_option, quiet_option

SHAPES = {
    "gpt2-small": LayerShape("gpt2", 768, 12, 12, 3072, 0),
    "smollm2": LayerShape("llama", 576, 9, 3, 1536, 0),
}

shape_option = click.option(
    "--shape", default="gpt2-small", show_default=True, type=click.Choice(sorted(SHAPES)), help="Of whose layer."
)
_ops = click.Choice(["generic", "plugin", "stock"])
_references = click.Choice(["learned", "sink", "maxima"])


@click.command("prompt")
@shape_option
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(2), help="Length of the prompt.")
@click.option(
    "--ops", default="plugin", show_default=True, type=click.Choice(["generic", "plugin", "stock"]), help="Whose operations."
)
@protocol_option
@click.option("--reference", default="learned", show_default=True, type=_references, help="What the plugin's softmax subtracts.")
@json_option
@quiet_option
def prompt_command(shape: str, tokens: int, ops: str, protocol: str, reference: Reference, as_json: bool, quiet: bool) -> None:
    """One decoder layer over a prompt: softmax, norms, activation and all of it; compute, messages and bytes one party sends.

    \b
    Examples:
      spu-llm bench prompt --tokens 512
      spu-llm bench prompt --shape smollm2 --tokens 64 --ops stock --protocol ABY3 --json
    """
    if ops == "plugin" and protocol != "SEMI2K":
        raise UserError(f"--ops plugin: runs on SEMI2K, not on {protocol}; leave --protocol out or use --ops generic")
    config = ProtocolConfig.model_validate({"name": protocol})
    found = bench_prompt(SHAPES[shape], tokens, config, ops, reference, silent if quiet else bar)
    click.echo(json.dumps({"shape": shape, **found}) if as_json else _table(found))


def _table(found: dict[str, Any]) -> str:
    columns = ("seconds", "messages", "bytes", "dealer_bytes", "dealer_seconds")
    lines = [f"{'':12}" + "".join(f"{name:>16}" for name in columns)]
    for part, cost in found["parts"].items():
        cells = (f"{cost[name]:16.3f}" if "seconds" in name else f"{cost[name]:16,}" for name in columns)
        lines.append(f"{part:12}" + "".join(cells))
    return "\n".join([*lines, f"largest error {found['max_error']:.2g}", f"trust: {found['trust']}"])
