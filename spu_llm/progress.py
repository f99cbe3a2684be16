"""Progress of long work, shown on standard error so that standard output stays text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
Progress = Callable[[Sequence[T], str, str], Iterable[T]]
"""Wraps a sequence that is about to be worked through: (items, what is done, unit of an item)."""


def silent(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """No progress shown."""
    return items


def bar(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """A progress bar."""
    return tqdm(items, desc=what, unit=unit, file=sys.stderr, leave=False, dynamic_ncols=True)
