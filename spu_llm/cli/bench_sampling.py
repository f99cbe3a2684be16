"""`spu-llm bench sampling`: what it costs to sample drafted tokens under encryption, naively and as POST does here."""

from __future__ import annotations

import json
from typing import Any

import click

from ..bench.sampling import bench_sampling
from ..errors import UserError
from ..experiment.schema import load_network
from ..progress import bar, silent
from ..runtime import ProtocolConfig
from .options import json_option, protocol_option, quiet_option, repeats_option

_NETWORKS = ("lan", "wan")


@click.command("sampling")
@click.option("--vocabulary", default=512, show_default=True, type=click.IntRange(2), help="Words to sample from.")
@click.option("--draft-length", default=8, show_default=True, type=click.IntRange(1), help="Drafted tokens of a pass.")
@click.option("--ops", default="plugin", show_default=True, type=click.Choice(["plugin", "stock"]), help="Whose operations.")
@protocol_option
@click.option("--refined", is_flag=True, help="With a second reference, which poor predictions of the log sum need (plugin).")
@repeats_option
@json_option
@quiet_option
def sampling_command(
    vocabulary: int, draft_length: int, ops: str, protocol: str, refined: bool, repeats: int, as_json: bool, quiet: bool
) -> None:
    """Sampling of drafted tokens, naive and optimised: compute, messages and bytes one party sends, seconds modelled on networks.

    \b
    Examples:
      spu-llm bench sampling --vocabulary 512 --draft-length 8
      spu-llm bench sampling --vocabulary 512 --draft-length 8 --ops stock --protocol CHEETAH --repeats 1 --json
    """
    if ops == "plugin" and protocol != "SEMI2K":
        raise UserError(f"--ops plugin: runs on SEMI2K, not on {protocol}; leave --protocol out or use --ops stock")
    if ops == "stock" and refined:
        raise UserError("--refined: is for --ops plugin; stock operations have room for poor predictions; leave it out")
    networks = [load_network(name) for name in _NETWORKS]
    config, progress = ProtocolConfig.model_validate({"name": protocol}), silent if quiet else bar
    found = bench_sampling(vocabulary, draft_length, ops, config, networks, repeats, refined, progress)
    click.echo(json.dumps(found) if as_json else _table(found))


def _table(found: dict[str, Any]) -> str:
    keys = ("seconds", "messages", "bytes", "dealer_bytes")
    lines = [f"{'':12}" + "".join(f"{name:>14}" for name in (*keys, *_NETWORKS))]
    for way in ("naive", "optimised", "ratio"):
        cost = found[way]
        cells = [cost.get(key) for key in keys] + [
            cost["modelled"][name] if "modelled" in cost else cost[name] for name in _NETWORKS
        ]
        lines.append(f"{way:12}" + "".join(_cell(cell) for cell in cells))
    return "\n".join([*lines, f"trust: {found['trust']}"])


def _cell(value: float | None) -> str:
    return f"{'':14}" if value is None else f"{value:14,}" if isinstance(value, int) else f"{value:14.3f}"
