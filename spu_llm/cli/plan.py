"""`spu-llm plan`: costs from shapes alone."""

from __future__ import annotations

import click

from .plan_arhe import plan_arhe_command


@click.group("plan")
def plan_group() -> None:
    """Say what a run will cost, from shapes alone."""


plan_group.add_command(plan_arhe_command)
