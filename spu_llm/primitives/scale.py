"""Element-wise product of two values that are truncated as they are opened, exact in the whole ring.

Made for norms and softmax: un-normalised outputs times one scalar a row, without a truncation message before the product.
Each operand is opened once; with x = P + [R] + f[W] (f public: see `Lifted`) the four products of hidden parts come from
the dealer: 32 bytes an output element, beside 16 an operand element.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .base import define
from .dealing import Dealing, Request, Value
from .fixed import Fixed, dropped
from .stock import shifted


def scale(x: Fixed, y: Fixed, x_bits: int, y_bits: int) -> Fixed:
    """x * y with broadcasting, after rounding the operands to `x_bits` and `y_bits`. 1 round, 8 bytes an operand element.

    Needs |raw| < 2^(modulus - 2) of both operands.
    """
    params = {"shifts": (dropped(x, x_bits), dropped(y, y_bits)), "moduli": (x.modulus, y.modulus)}
    return Fixed(scale_p.bind(x.raw, y.raw, **params), x_bits + y_bits)


def _plain(x: Any, y: Any, *, shifts: tuple[int, int], moduli: tuple[int, int]) -> Any:
    return (x >> shifts[0]) * (y >> shifts[1])


def _stock(x: Any, y: Any, *, shifts: tuple[int, int], moduli: tuple[int, int]) -> Any:
    return shifted(x, shifts[0]) * shifted(y, shifts[1])


def _dealer(
    dealing: Dealing, x: Value, y: Value, *, shifts: tuple[int, int], moduli: tuple[int, int]
) -> Generator[Request, None, Any]:
    dealing.request(x, y)
    a = yield from dealing.lifted(x, shifts[0], moduli[0])
    b = yield from dealing.lifted(y, shifts[1], moduli[1])

    def product(r: Any, s: Any) -> Any:
        return dealing.recorder.derive(lambda u, v: u * v, r, s).share

    hidden = product(a.hidden, b.hidden) + b.flag * product(a.hidden, b.wrap)
    wrapped = product(a.wrap, b.hidden) + b.flag * product(a.wrap, b.wrap)
    left = a.public * b.share + (a.hidden.share + a.flag * a.wrap.share) * b.public
    return left + hidden + a.flag * wrapped


scale_p = define("scale", _plain, _stock, _dealer, eager=True)
