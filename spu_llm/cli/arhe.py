"""`spu-llm arhe`: decoding under CKKS."""

from __future__ import annotations

import click

from .arhe_client import decrypt_command, encrypt_command, keys_command
from .arhe_run import run_command
from .arhe_server import publish_command, serve_command
from .arhe_simulate import simulate_command


@click.group("arhe")
def arhe_group() -> None:
    """Decoding that the server does alone under CKKS, the client offline (AR-HE)."""


arhe_group.add_command(simulate_command)
arhe_group.add_command(run_command)
arhe_group.add_command(publish_command)
arhe_group.add_command(keys_command)
arhe_group.add_command(encrypt_command)
arhe_group.add_command(serve_command)
arhe_group.add_command(decrypt_command)
