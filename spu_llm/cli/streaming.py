"""Text that streams to standard output, and progress bars that leave it readable."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ..progress import Progress, bar, silent


def stream(text: str) -> None:
    """Generated text as it comes; progress bars live on standard error."""
    click.echo(text, nl=False)
    sys.stdout.flush()


def beside_text(quiet: bool) -> Progress:
    """Bars on standard error; none for the tokens themselves where their text streams to the same terminal."""

    def show(items: Sequence[Any], what: str, unit: str) -> Iterable[Any]:
        hidden = quiet or (unit == "token" and sys.stdout.isatty())
        return silent(items, what, unit) if hidden else bar(items, what, unit)

    return show
