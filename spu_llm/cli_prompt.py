"""`spu-llm bench prompt`, `bench keys`, `bench tables`: a layer over a prompt, what is dealt for it, and by which tables."""

from __future__ import annotations

import json
from typing import Any

import click

from .bench.keys import bench_keys
from .bench.layer import LayerShape
from .bench.prompt import bench_prompt
from .bench.tables import bench_tables
from .errors import UserError
from .experiment.schema import load_model
from .models import load_checkpoint
from .models.calibration import Reference
from .models.calibration_file import calibration_for
from .progress import bar, silent
from .runtime import ProtocolConfig

SHAPES = {
    "gpt2-small": LayerShape("gpt2", 768, 12, 12, 3072, 0),
    "smollm2": LayerShape("llama", 576, 9, 3, 1536, 0),
}


_shape = click.option("--shape", default="gpt2-small", show_default=True, type=click.Choice(sorted(SHAPES)), help="Of whose layer.")
_ops = click.Choice(["generic", "plugin", "stock"])
_references = click.Choice(["learned", "sink", "maxima"])


@click.command("prompt")
@_shape
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(2), help="Length of the prompt.")
@click.option(
    "--ops", default="plugin", show_default=True, type=click.Choice(["generic", "plugin", "stock"]), help="Whose operations."
)
@click.option("--protocol", default="SEMI2K", show_default=True, type=click.Choice(["SEMI2K", "ABY3", "CHEETAH"]))
@click.option("--reference", default="learned", show_default=True, type=_references, help="What the plugin's softmax subtracts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
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


@click.command("keys")
@_shape
@click.option("--tokens", "lengths", multiple=True, type=click.IntRange(2), help="Length of a prompt; twice or more.")
@click.option("--layers", default=12, show_default=True, type=click.IntRange(1), help="Layers of the model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def keys_command(shape: str, lengths: tuple[int, ...], layers: int, as_json: bool, quiet: bool) -> None:
    """What the dealer sends for a prompt, counted without running it: keys of tables and all of it, to the party that gets more.

    \b
    Example:
      spu-llm bench keys --tokens 64 --tokens 128 --tokens 512
    """
    if len(set(lengths)) < 2:
        raise UserError(f"--tokens {' '.join(map(str, lengths)) or 'missing'}: give two lengths or more, such as 64 and 512")
    found = bench_keys(SHAPES[shape], sorted(set(lengths)), layers, silent if quiet else bar)
    if as_json:
        click.echo(json.dumps({"shape": shape, **found}))
        return
    click.echo(f"{'tokens':>8}{'layer MB':>12}{'of it keys':>12}{'model GB':>12}")
    for prompt in found["prompts"]:
        sizes = (prompt["total"] / 1e6, prompt["lookup"] / 1e6, prompt["model_bytes"] / 1e9)
        click.echo(f"{prompt['tokens']:8}" + "".join(f"{size:12.1f}" for size in sizes))


@click.command("tables")
@click.option("--model", default="smollm2", show_default=True, help="Name in configs/model, or path of a model's YAML.")
@click.option("--context", default=64, show_default=True, type=click.IntRange(0), help="Positions in the cache.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def tables_command(model: str, context: int, as_json: bool, quiet: bool) -> None:
    """Which lookup tables each layer's measured ranges choose, and what that saves of keys and expansion.

    \b
    Example:
      spu-llm bench tables --model smollm2 --context 512
    """
    config = load_model(model)
    checkpoint = load_checkpoint(config.locate())
    calibration, _ = calibration_for(config, checkpoint, silent if quiet else bar)
    found = bench_tables(checkpoint.decoder.config, calibration, context)
    if as_json:
        click.echo(json.dumps({"model": model, **found}))
        return
    for i, sizes in enumerate(found["sizes"]):
        click.echo(f"layer {i:3}  " + "  ".join(f"{name} {size}" for name, size in sizes.items()))
    for name in ("layers", "each", "joined", "widest"):
        click.echo(f"{name:8} {found[name]['key_bytes'] / 1e6:8.2f} MB of keys, {found[name]['words'] / 1e6:8.2f} M words a token")


def _table(found: dict[str, Any]) -> str:
    columns = ("seconds", "messages", "bytes", "dealer_bytes", "dealer_seconds")
    lines = [f"{'':12}" + "".join(f"{name:>16}" for name in columns)]
    for part, cost in found["parts"].items():
        cells = (f"{cost[name]:16.3f}" if "seconds" in name else f"{cost[name]:16,}" for name in columns)
        lines.append(f"{part:12}" + "".join(cells))
    return "\n".join([*lines, f"largest error {found['max_error']:.2g}", f"trust: {found['trust']}"])
