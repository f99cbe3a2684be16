"""`spu-llm bench op`: one operation, by dealer protocols and as stock SPU has it."""

from __future__ import annotations

import json

import click

from ..bench.op import HEADER, OPS, bench_op, row
from ..runtime import ProtocolConfig
from ..runtime.assisted import TRUST
from .options import repeats_option


@click.command("op")
@click.option("--op", "name", required=True, type=click.Choice([*OPS, "all"]), help="What to measure.")
@click.option("--elements", default=1024, show_default=True, type=click.IntRange(1), help="Of the first input; rows are of 64.")
@repeats_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table; of all, an object each by name.")
def op_command(name: str, elements: int, repeats: int, as_json: bool) -> None:
    """One operation by dealer protocols, and as stock SPU has it: bytes an element, messages, error over its whole range.

    \b
    Examples:
      spu-llm bench op --op gelu --json
      spu-llm bench op --op softmax --elements 16384
      spu-llm bench op --op all
    """
    names = list(OPS) if name == "all" else [name]
    if as_json:
        found = {each: bench_op(each, elements, repeats) for each in names}
        click.echo(json.dumps(found if name == "all" else found[name]))
        return
    click.echo(HEADER)
    for each in names:
        click.echo(row(each, bench_op(each, elements, repeats)))
    click.echo("Bytes one party sends, or is sent by the dealer, for each element of the first input.")
    click.echo(f"trust: {TRUST}; stock: {ProtocolConfig().trust}")
