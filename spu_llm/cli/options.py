"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UserError

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
model_option = click.option(
    "--model", default="smollm2", show_default=True, help="Name in configs/model, or path of a model's YAML."
)
protocol_option = click.option(
    "--protocol", default="SEMI2K", show_default=True, type=click.Choice(["SEMI2K", "ABY3", "CHEETAH"]), help="SPU's protocol."
)
quiet_option = click.option("--quiet", is_flag=True, help="No progress bars.")
repeats_option = click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1), help="Timed passes; medians are printed."
)
ring_option = click.option(
    "--ring", default="FM64", show_default=True, type=click.Choice(["FM64", "FM128"]), help="Integers modulo 2^64 or 2^128."
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a setting of the config; repeatable."
)
soal_option = click.option("--soal", type=click.Path(path_type=Path), help="The model's file from `spu-llm prepare soal`.")


def numbers(option: str, text: str) -> list[int]:
    """Numbers with commas between. Raises UserError, naming the option, for what are none."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{option} {text}: give numbers above 0 with commas between, such as 1,9,64")
    return found
