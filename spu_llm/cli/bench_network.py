"""`spu-llm bench network`: whether the emulated links are what their profiles say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from ..errors import UserError
from ..experiment.schema import CONFIGS, read_yaml
from ..network import NetworkProfile
from ..network.emulation import netem_refusal
from ..network.emulation_check import check_emulation, measure_ceiling
from ..network.openings import time_openings
from ..progress import bar, silent
from .options import json_option, quiet_option

_USUAL = ("100mbps_link", "5gbps_link", "lan_link", "wan_link")


@click.command("network")
@click.option(
    "--network", "names", multiple=True, help="Name in configs/network, or path of a YAML; repeated.  [default: all links]"
)
@click.option("--openings", is_flag=True, help="Time SPU's openings too, and compare with the cost model.")
@json_option
@quiet_option
def network_command(names: tuple[str, ...], openings: bool, as_json: bool, quiet: bool) -> None:
    """Round trip and throughput of emulated links against their profiles, and the most the emulation carries here.

    \b
    Examples:
      spu-llm bench network
      spu-llm bench network --network lan_link --openings --json
    """
    profiles = [_profile(name) for name in names or _USUAL]
    ceiling, found = measure_ceiling(), []
    for profile in (silent if quiet else bar)(profiles, "measuring", "link"):
        check = check_emulation(profile, ceiling)
        timed = [{**asdict(each), "error": each.error} for each in time_openings(profile)] if openings else None
        found.append({**check.as_dict(), **({"openings": timed} if openings else {})})
    result = {"netem": netem_refusal() or "available", "ceiling": asdict(ceiling), "links": found}
    click.echo(json.dumps(result) if as_json else _table(result))


def _profile(name: str) -> NetworkProfile:
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / "network" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in (CONFIGS / "network").glob("*.yaml")))
        raise UserError(f"--network {name!r}: no such profile; known: {known}, or give the path of a .yaml file")
    try:
        profile = NetworkProfile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {error.errors()[0]['msg'].removeprefix('Value error, ')}; correct the profile") from None
    if profile.bandwidth_mbps is None or not profile.delay_ms:
        raise UserError(f"--network {name!r}: has no bandwidth or no delay that a link could be held against; give another")
    return profile


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'link':14} {'round trip ms':>14} {'measured':>9} {'Mbps each way':>14} {'measured':>9}  within 5%"]
    for link in result["links"]:
        lines.append(
            f"{link['profile']:14} {link['asked_rtt_ms']:14g} {link['measured_rtt_ms']:9.2f} {link['asked_mbps']:14g} "
            f"{link['measured_mbps']:9.0f}  {'yes' if link['within_5_percent'] else 'NO'}"
        )
    for link in result["links"]:
        lines += _opening_lines(link)
    ceiling = result["ceiling"]
    lines.append(
        f"The relay carries up to {ceiling['mbps']:.0f} Mbps here, {ceiling['both_mbps']:.0f} in each direction at the same time; "
        f"a round trip without it takes {ceiling['direct_ms']:.2f} ms."
    )
    return "\n".join([*lines, f"netem: {result['netem']}"])


def _opening_lines(link: dict[str, Any]) -> list[str]:
    """SPU's openings over one link, in ms."""
    if "openings" not in link:
        return []
    lines = [f"{link['profile'] + ': opening of':24} {'bare ms':>9} {'link ms':>9} {'model ms':>9}  model's error"]
    for each in link["openings"]:
        times = " ".join(f"{each[key] * 1e3:9.2f}" for key in ("bare_seconds", "link_seconds", "model_seconds"))
        lines.append(f"{each['size']:18} bytes {times}  {each['error']:+.1%}")
    return lines
