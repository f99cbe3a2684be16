"""Sums of products of two secret operands: dots with weights, with a growing cache, squares, element-wise products.

One opening of each operand that was not opened before (8 bytes an element, all in one message); an operand that was
(weights, cache rows, something another protocol opened) costs nothing. x*y = P_x [y] + [R_x] P_y + [R_x R_y] for opened
x = P_x + R_x (Beaver, CRYPTO 1991, with one-time and operand masks). Dealer: 8 bytes an output element, and 8 for
each element of an operand that is truncated as it is opened.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import define
from .dealing import Dealing, Request, Value
from .fixed import Fixed, dropped
from .stock import shifted

_PIECE = 1 << 18  # words of a matrix that are multiplied at a time: 2 MB


def contract(subscripts: str, x: Fixed, y: Fixed, x_bits: int | None = None, y_bits: int | None = None) -> Fixed:
    """`jnp.einsum(subscripts, x, y)`, exact but for the operands' own rounding.

    An operand is rounded down to `x_bits` / `y_bits` fraction bits as it is opened, which costs no message but that many
    bits of modulus: the result is right modulo 2^min(modulus_x - shift_x, modulus_y - shift_y). 1 round.
    """
    shifts = tuple(dropped(f, f.bits if bits is None else bits) for f, bits in ((x, x_bits), (y, y_bits)))
    moduli = (x.modulus, y.modulus)
    raw = contract_p.bind(x.raw, y.raw, subscripts=subscripts, shifts=shifts, moduli=moduli)
    left = min(modulus - shift for modulus, shift in zip(moduli, shifts, strict=True))
    return Fixed(raw, x.bits + y.bits - sum(shifts), left)


def _plain(x: Any, y: Any, *, subscripts: str, shifts: tuple[int, int], moduli: tuple[int, int]) -> Any:
    return jnp.einsum(subscripts, x >> shifts[0], y >> shifts[1])


def _stock(x: Any, y: Any, *, subscripts: str, shifts: tuple[int, int], moduli: tuple[int, int]) -> Any:
    return jnp.einsum(subscripts, shifted(x, shifts[0]), shifted(y, shifts[1]))


def _dealer(
    dealing: Dealing, x: Value, y: Value, *, subscripts: str, shifts: tuple[int, int], moduli: tuple[int, int]
) -> Generator[Request, None, Any]:
    dealing.request(x, y)
    a = yield from dealing.opened(x, shifts[0], moduli[0])
    b = yield from dealing.opened(y, shifts[1], moduli[1])
    product = dealing.recorder.derive(lambda r, s: integer_einsum(subscripts, r, s), a.hidden, b.hidden)
    # The sum of public part and share is made of the smaller operand, or is there already: what is left then stands on the
    # dealer's words and an operand alone, and can be done before the other operand is known (runtime/ahead.py).
    if a.whole is not None or (b.whole is None and a.public.size <= b.public.size):
        parts = (a.share, b.public), (a.public, b.hidden.share)
    else:
        parts = (a.public, b.share), (a.hidden.share, b.public)
    return _einsum(subscripts, *parts[0]) + _einsum(subscripts, *parts[1]) + product.share


def integer_einsum(subscripts: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """einsum of int64 numpy arrays modulo 2^64."""
    return np.einsum(subscripts, x, y)  # five times faster than `@` on integers


def _einsum(subscripts: str, x: Any, y: Any) -> Any:
    """einsum as SPU does it fastest.

    Where nothing is summed a plain product, since einsum would loop over every element. Where a matrix is larger than a processor's
    cache and meets several rows, piece by piece of its outputs: SPU's product lays out the whole of it anew otherwise.
    """
    left, right, out = subscripts.replace("->", ",").split(",")
    if left == right == out:
        return x * y
    own = [letter for letter in right if letter in out and letter not in left]
    if y.size <= _PIECE or x.shape[0] == 1 or len(own) != 1 or out[-1:] != own[0] or len(right) != 2:
        return jnp.einsum(subscripts, x, y)
    axis = right.index(own[0])
    step = max(1, _PIECE * y.shape[axis] // y.size)
    pieces = [jax.lax.slice_in_dim(y, at, min(at + step, y.shape[axis]), axis=axis) for at in range(0, y.shape[axis], step)]
    return jnp.concatenate([jnp.einsum(subscripts, x, piece) for piece in pieces], -1)


def _batch(args: tuple, axes: tuple, *, subscripts: str, **params: Any) -> tuple[Any, int]:
    """A new einsum letter for the batch axis of whichever operand has one."""
    inputs, output = subscripts.split("->")
    letter = next(c for c in "zyxwvutsrqponmlk" if c not in subscripts)
    named, moved = [], []
    for arg, axis, part in zip(args, axes, inputs.split(","), strict=True):
        moved.append(arg if axis is None else jnp.moveaxis(arg, axis, 0))
        named.append(part if axis is None else letter + part)
    return contract_p.bind(*moved, subscripts=f"{','.join(named)}->{letter}{output}", **params), 0


contract_p = define("contract", _plain, _stock, _dealer, _batch, eager=True)
