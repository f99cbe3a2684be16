"""Exact truncation: one opening, 8 bytes an element, for |raw| < 2^(modulus - 2) (DESIGN, section 2, "Truncation").

Also brings a value known modulo 2^modulus back to the whole ring. The result is x / 2^shift rounded up or down at random
with the right mean, never further off. Dealer: 16 bytes an element.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .base import define
from .dealing import Dealing, Request, Value
from .fixed import Fixed, dropped
from .stock import shifted


def truncate(x: Fixed, bits: int) -> Fixed:
    """x with `bits` fraction bits, in the whole ring. 1 round."""
    if bits >= x.bits:
        raise ValueError(f"truncate from {x.bits} to {bits} fraction bits: nothing to drop; use at_bits")
    return Fixed(truncate_p.bind(x.raw, shift=dropped(x, bits), modulus=x.modulus), bits)


def _plain(x: Any, *, shift: int, modulus: int) -> Any:
    return x >> shift


def _stock(x: Any, *, shift: int, modulus: int) -> Any:
    return shifted(x, shift)


def _dealer(dealing: Dealing, x: Value, *, shift: int, modulus: int) -> Generator[Request, None, Any]:
    lifted = yield from dealing.lifted(x, shift, modulus)
    return lifted.share


truncate_p = define("truncate", _plain, _stock, _dealer)
