"""`spu-llm prepare`: the model owner's offline steps."""

from __future__ import annotations

import click

from .prepare_comet import comet_command
from .prepare_soal import soal_command


@click.group("prepare")
def prepare_group() -> None:
    """What a model's owner does once, before any client comes."""


prepare_group.add_command(soal_command)
prepare_group.add_command(comet_command)
