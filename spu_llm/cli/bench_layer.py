"""`spu-llm bench layer`: one decoder layer for one token."""

from __future__ import annotations

import json

import click

from ..bench.layer import LayerShape, bench_layer
from ..bench.layer_steps import check_steps, layer_steps
from ..errors import UserError
from ..models.decoder import FAMILIES
from ..runtime import ProtocolConfig
from .options import json_option, protocol_option, repeats_option, ring_option


@click.command("layer")
@click.option("--family", default="gpt2", show_default=True, type=click.Choice(sorted(FAMILIES)))
@click.option("--width", default=768, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=12, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads (llama and mixtral).  [default: as --heads]")
@click.option("--ffn", default=3072, show_default=True, type=click.IntRange(1), help="Hidden units, of each expert.")
@click.option("--experts", type=click.IntRange(1), help="Experts (mixtral only).  [default: 8]")
@click.option("--experts-per-token", type=click.IntRange(1), help="Experts a token is given to (mixtral only).  [default: 2]")
@click.option("--context", default=64, show_default=True, type=click.IntRange(1), help="Positions in the cache already.")
@click.option(
    "--ops",
    default="stock",
    show_default=True,
    type=click.Choice(["plugin", "generic", "stock"]),
    help="Whose operations; generic: SPU's, functions narrowed. Those two run stock SPU too.",
)
@protocol_option
@ring_option
@repeats_option
@click.option("--steps", is_flag=True, help="Messages and bytes of each step too, in order.")
@json_option
def layer_command(
    family: str, width: int, heads: int, kv_heads: int | None, ffn: int, experts: int | None, experts_per_token: int | None,
    context: int, ops: str, protocol: str, ring: str, repeats: int, steps: bool, as_json: bool,
) -> None:  # fmt: skip
    """One decoder layer for one new token, weights opened before.

    \b
    Examples:
      spu-llm bench layer --family gpt2 --width 768 --heads 12 --ffn 3072 --context 64 --json
      spu-llm bench layer --ops plugin --context 1024
      spu-llm bench layer --ops plugin --steps
      spu-llm bench layer --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536 --json
      spu-llm bench layer --ops plugin --family mixtral --width 64 --heads 4 --kv-heads 2 --ffn 128 --experts 8
    """
    if kv_heads not in (None, heads) and family not in ("llama", "mixtral"):
        raise UserError(f"--kv-heads {kv_heads}: {family} has as many key/value heads as heads; leave it out")
    if ops == "plugin" and (protocol, ring) != ("SEMI2K", "FM64"):
        raise UserError(f"--ops plugin: runs on SEMI2K in FM64, not on {protocol} in {ring}; leave --protocol and --ring out")
    if family == "mixtral":
        experts, experts_per_token = experts or 8, experts_per_token or 2
    elif experts or experts_per_token:
        raise UserError(f"--experts and --experts-per-token: {family} has no experts; leave them out, or use --family mixtral")
    shape = LayerShape(family, width, heads, kv_heads or heads, ffn, context, experts, experts_per_token)
    settings = ProtocolConfig.model_validate({"name": protocol, "ring": ring})
    if steps:
        check_steps(shape, settings, ops)
    result = {"ops": ops, **bench_layer(shape, settings, repeats, ops)}
    if steps:
        result = layer_steps(shape, settings, result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        for key in ("bytes", "messages", "seconds", "max_error", "failure_probability", "dealer_bytes", "trust"):
            beside = f"   (stock {result['stock'].get(key, '-')})" if "stock" in result and key != "trust" else ""
            click.echo(f"{key:20} {result.get(key, 0)}{beside}")
        for name, run in (("step", result), ("step of stock SPU", result.get("stock", {}))):
            for step in run.get("steps", ()):
                click.echo(f"{name:20} {step['name']:22} {step['messages']:4} messages {step['bytes']:9,} bytes")
