"""`spu-llm arhe`: decoding under CKKS."""

from __future__ import annotations

import click

from .arhe_run import run_command
from .arhe_service import SERVICE_COMMANDS
from .arhe_simulate import simulate_command


@click.group("arhe")
def arhe_group() -> None:
    """Decoding that the server does alone under CKKS, the client offline (AR-HE)."""


for command in (simulate_command, run_command, *SERVICE_COMMANDS):
    arhe_group.add_command(command)
