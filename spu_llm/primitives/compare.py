"""Signs, comparisons, relu and maximum of secret numbers, exactly: 3 messages of 8 bytes an element, fewer for few bits.

x = c - u for the opened c and the dealer's u. The sign of x is the sum modulo 2 of the top bits of c and u and the borrow of
their low bits. Those are cut into K chunks. For each the dealer shares a table over c's chunk: whether that is above (1) or
below (-1) u's chunk, times 2^(k-1) for chunk k > 0; chunk 0 tells "below" only. The entries at c's chunks, picked locally, add
up to a number of K bits, which is negative if there is a borrow and not otherwise. Its sign is found the same way: 63 bits
become 16, these become 3, and a table of 2^3 entries ends it. Only that one has words of the whole ring; all others need be
right modulo 2^K only, so that their words are K / 8 bytes long and plain words cost less than distributed point functions.

The last table may also hold the bit times anything the dealer knows. So the product of the bit with an opened value, which
relu, maximum and argmax need, costs no message.

Of 1,000 elements with |raw| < 2^63 (2^39; 2^20), each: 24 (24; 16) bytes in 3 (3; 2) messages; 672 (320; 256) dealer bytes to
both parties together, 363 (295; 146) words of material. On two cores 25 (15; 8) ms online, of which picking entries is three
quarters, and 6 (5; 2) ms offline. Chunks of 8 bits would save a message and nearly half the time online, but take 4 KB of
dealer bytes, 2,300 words and ten times the time offline.

Comparing after a masked opening: Boyle, Gilboa, Ishai, "Secure Computation with Preprocessing via Function Secret Sharing"
(TCC 2019). Comparing digits, then what that gave: Garay, Schoenmakers, Villegas, "Practical and Secure Solutions for Integer
Comparison" (PKC 2007).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .dealing import Dealing, Opened, Request, Value, logical_shift
from .fixed import Fixed, aligned

_PICK, _OPENING = 60, 100
"""What picking an entry online and an opening cost, in words of material: by time, where online time counts several times."""
_BYTE = 0.25  # what a dealer byte costs in these
_LEVELS = 2  # of chunks, before the last table: a message each


def is_negative(x: Fixed, bits: int | None = None) -> Fixed:
    """1 where x < 0, else 0, in the whole ring. Needs -2^bits <= raw < 2^bits (by default modulus - 1). 3 rounds."""
    return Fixed(is_negative_p.bind(x.raw, width=sign_width(x, bits)), 0) if x.raw.size else Fixed(x.raw, 0)


def less(a: Fixed, b: Fixed, bits: int | None = None) -> Fixed:
    """1 where a < b, else 0. The bound is on the raw difference, at the finer scale. 3 rounds, 24 bytes an element."""
    return is_negative(a - b, bits)


def relu(x: Fixed, bits: int | None = None) -> Fixed:
    """max(x, 0), modulo 2^x.modulus. The bound is that of `is_negative`. 3 rounds, 24 bytes an element."""
    return x.with_raw(relu_p.bind(x.raw, width=sign_width(x, bits))) if x.raw.size else x


def maximum(a: Fixed, b: Fixed, bits: int | None = None) -> Fixed:
    """The larger of each pair, with broadcasting: b + relu(a - b), so the bound is on the difference. 3 rounds, 24 bytes."""
    a, b = aligned(a, b)
    return b + relu(a - b, bits)


def sign_width(x: Fixed, bits: int | None) -> int:
    """Bits of x to look at, its sign included. ValueError if x is not known modulo that many."""
    width = x.modulus if bits is None else bits + 1
    if not 1 <= width <= x.modulus:
        raise ValueError(f"signs of numbers of {bits} bits that are known modulo 2^{x.modulus}; use 0 to {x.modulus - 1} bits")
    return width


def negative(
    dealing: Dealing, x: Opened, width: int, carried: Sequence[Opened] = ()
) -> Generator[Request, None, tuple[Any, list[Any]]]:
    """Shares of the sign bit of x modulo 2^width, and of its product with each of `carried`, which have x's shape."""
    c, masks, widths, flip = x.public, [x.hidden], [width], jnp.int64(0)
    for chunk in chunk_widths(width):
        flip = flip ^ (logical_shift(c, widths[-1] - 1) & 1)
        value = Value(_borrow(dealing, Opened(c, masks[-1]), widths[-1], chunk))
        c = yield from dealing.open(value)
        assert value.mask is not None
        masks.append(value.mask)
        widths.append(_count(widths[-1], chunk))
    table = dealing.recorder.derive(partial(_signs, widths=tuple(widths)), *masks, *(y.hidden for y in carried))
    row = pick(table.share, c & ((1 << widths[-1]) - 1))
    sign = 1 - 2 * flip
    bit = flip + sign * row[..., 0]
    products = [y.public * bit + flip * y.hidden.share + sign * row[..., i] for i, y in enumerate(carried, 1)]
    return bit, products


def pick(rows: Any, index: Any) -> Any:
    """rows [..., K, P] at a public index [...] below K: [..., P]."""
    return jnp.take_along_axis(rows, index[..., None, None], axis=-2, mode="promise_in_bounds")[..., 0, :]


def _borrow(dealing: Dealing, x: Opened, width: int, chunk: int) -> Any:
    """A number of as many bits as there are chunks, negative if the low width - 1 bits of c are below those of u."""
    count = _count(width, chunk)
    steps = dealing.recorder.derive(partial(_steps, width=width, chunk=chunk), x.hidden, modulus=count)
    low = x.public & ((1 << (width - 1)) - 1)
    places = jnp.right_shift(low[..., None], chunk * np.arange(count)) & ((1 << chunk) - 1)
    return jnp.sum(pick(steps.share[..., None], places)[..., 0], -1)


def _steps(hidden: np.ndarray, width: int, chunk: int) -> np.ndarray:
    """[..., chunks, 2^chunk]: what each value of a chunk of c adds to the number that tells the borrow; u = -hidden.

    In words just long enough, as there are many of them.
    """
    count, values = _count(width, chunk), np.arange(1 << chunk)
    word = _word(count)
    above = np.sign(values - values[:, None])
    places = (-hidden & ((1 << (width - 1)) - 1))[..., None] >> chunk * np.arange(count) & ((1 << chunk) - 1)
    steps = above.astype(word)[places]
    steps[..., 0, :] = np.minimum(above, 0).astype(word)[places[..., 0]]
    steps <<= np.maximum(np.arange(count) - 1, 0).astype(word)[:, None]
    return steps


def _signs(*hidden: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """[..., 2^width, 1 + carried]: the sign bit for each value of the last c, added to u's top bits so far; times each carried.

    The first len(widths) of `hidden` are the masks, the others are of the carried values.
    """
    masks, carried = hidden[: len(widths)], hidden[len(widths) :]
    values = np.arange(1 << widths[-1]) + masks[-1][..., None]
    bit = values >> widths[-1] - 1 & 1
    for mask, width in zip(masks[:-1], widths[:-1], strict=True):
        bit = bit ^ (-mask >> width - 1 & 1)[..., None]
    return np.stack([bit, *(bit * y[..., None] for y in carried)], -1)


def _count(width: int, chunk: int) -> int:
    """Chunks of all bits but the sign."""
    return -(-(width - 1) // chunk)


@cache
def chunk_widths(width: int) -> tuple[int, ...]:
    """Bits a chunk on each level, none where a table of 2^width entries is cheapest."""
    return _cheapest(width, _LEVELS)[1]


def _cheapest(width: int, levels: int) -> tuple[float, tuple[int, ...]]:
    best: tuple[float, tuple[int, ...]] = (_PICK + (1 + 8 * _BYTE) * (1 << width), ())
    for chunk in range(2, 9) if levels and width > 2 else ():
        count = _count(width, chunk)
        rest, chunks = _cheapest(count, levels - 1)
        table = _PICK + (1 + _word(count).itemsize * _BYTE) * (1 << chunk)
        best = min(best, (rest + _OPENING + count * table, (chunk, *chunks)))
    return best


def _word(bits: int) -> np.dtype:
    """The shortest type for numbers modulo 2^bits."""
    return np.dtype("u1" if bits <= 8 else "u2" if bits <= 16 else "u4" if bits <= 32 else "u8")


def _negative_plain(x: Any, *, width: int) -> Any:
    return (x < 0).astype(jnp.int64)


def _negative_dealer(dealing: Dealing, x: Value, *, width: int) -> Generator[Request, None, Any]:
    opened = yield from dealing.opened(x)
    bit, _ = yield from negative(dealing, opened, width)
    return bit


def _relu_plain(x: Any, *, width: int) -> Any:
    return jnp.where(x < 0, 0, x)


def _relu_stock(x: Any, *, width: int) -> Any:
    return x * (x >= 0)


def _relu_dealer(dealing: Dealing, x: Value, *, width: int) -> Generator[Request, None, Any]:
    opened = yield from dealing.opened(x)
    _, (product,) = yield from negative(dealing, opened, width, [opened])
    return opened.share - product


is_negative_p = define("is_negative", _negative_plain, _negative_plain, _negative_dealer)
relu_p = define("relu", _relu_plain, _relu_stock, _relu_dealer)
