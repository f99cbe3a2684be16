"""The table that `fit.py` writes: fitted chains by name, and the cheapest of them for a range."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from .chain import Chain

FILE = Path(__file__).with_name("coefficients.json")


@cache
def chains(name: str) -> tuple[Chain, ...]:
    """Every chain of this name, the fewest squarings first, and of equal ones the narrowest."""
    found = []
    for fields in json.loads(FILE.read_text())[name]:
        fields |= {key: tuple(fields[key]) for key in ("constants", "weights")}
        found.append(Chain(**fields))
    return tuple(sorted(found, key=lambda chain: (chain.levels, chain.high - chain.low)))


def cheapest(name: str, low: float, high: float) -> Chain | None:
    """The chain of the fewest squarings whose range holds [low, high]; None where none does."""
    return next((chain for chain in chains(name) if chain.low <= low and high <= chain.high), None)
