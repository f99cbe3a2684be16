"""The command line: `spu-llm`. A file for each command, named by its words; a group adds its commands itself."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..errors import UserError
from .align import align_command
from .arhe import arhe_group
from .beaver import beaver_command
from .bench import bench_group
from .certificates import certificates_command
from .deal import deal_command
from .fetch import fetch_command
from .generate import generate_command
from .party import dealer_command, party_command
from .plan import plan_group
from .plan_table import plan_table_command
from .prepare import prepare_group
from .reproduce import reproduce_command
from .run import run_command


class _Commands(click.Group):
    """Prints a UserError as one line and exits with 2; other errors are defects and keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="spu_llm")
def main() -> None:
    """Private LLM text generation on SecretFlow-SPU: one party holds the prompt, another the weights."""


main.add_command(align_command)
main.add_command(arhe_group)
main.add_command(beaver_command)
main.add_command(bench_group)
main.add_command(certificates_command)
main.add_command(deal_command)
main.add_command(fetch_command)
main.add_command(generate_command)
main.add_command(dealer_command)
main.add_command(party_command)
main.add_command(plan_group)
main.add_command(plan_table_command)
main.add_command(prepare_group)
main.add_command(reproduce_command)
main.add_command(run_command)
