"""The adjustments: what the adjusting party adds to its share, so that the parties' shares of masks become correlated.

With r the sum (for bits the exclusive or) of all parties' shares of an input, they are, as in SPU's `trusted_party.cc`:
    Mul      r0 r1 - r2                        Square   r0^2 - r1
    MulPriv  (product of the shares of input 0) - r1       Dot      r0 @ r1 - r2
    And      (r0 and r1) xor r2                Eqz      r0 xor r1, r1 joined by xor
    Trunc    (r0 >> bits, signed) - r1         TruncPr  (r0 mod 2^(l-1)) >> bits - r1, and r0's top bit - r2
    RandBit  random bit - r0                   Perm     r0 moved by the inverse permutation - r1
The parties hold the first inputs as they are; the last one becomes their shares of the function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .prg import permutation
from .ring import FIELDS, RINGS, Arithmetic
from .wire import Drawn, Request

_PIECE = 1 << 20
"""Bytes of an array that are computed at a time; a multiple of a cipher block, and what stays in the processor's cache."""

Seeds = Callable[[bytes], bytes]
"""From an encrypted seed to the seed."""


@dataclass(frozen=True)
class _Elementwise:
    """An adjustment that is made element by element of some of the request's inputs."""

    of: tuple[int, ...]
    make: Callable[..., np.ndarray]
    joined: tuple[str, ...] = ()
    """How the parties' shares of each are joined, "add" if not said."""


def _random_bits(n: int) -> np.ndarray:
    """uint8 [n], from the operating system."""
    return np.unpackbits(np.frombuffer(os.urandom(-(-n // 8)), np.uint8))[:n]


def _random_bit(ring: Any, bits: int, a: np.ndarray) -> np.ndarray:
    return ring.subtract(ring.bits_of(_random_bits(len(a))), a)


_ELEMENTWISE = {
    "AdjustMul": (_Elementwise((0, 1, 2), lambda ring, _, a, b, c: ring.subtract(ring.multiply(a, b), c)),),
    "AdjustMulPriv": (_Elementwise((0, 1), lambda ring, _, ab, c: ring.subtract(ab, c), ("multiply", "add")),),
    "AdjustSquare": (_Elementwise((0, 1), lambda ring, _, a, b: ring.subtract(ring.multiply(a, a), b)),),
    "AdjustAnd": (_Elementwise((0, 1, 2), lambda ring, _, a, b, c: (a & b) ^ c, ("xor",) * 3),),
    "AdjustTrunc": (_Elementwise((0, 1), lambda ring, bits, a, b: ring.subtract(ring.right_signed(a, bits), b)),),
    "AdjustTruncPr": (
        _Elementwise((0, 1), lambda ring, bits, a, b: ring.subtract(ring.right(ring.left(a, 1), bits + 1), b)),
        _Elementwise((0, 2), lambda ring, _, a, c: ring.subtract(ring.right(a, ring.bits - 1), c)),
    ),
    "AdjustRandBit": (_Elementwise((0,), _random_bit),),
    "AdjustEqz": (_Elementwise((0, 1), lambda ring, _, a, b: a ^ b, ("add", "xor")),),
}


def adjustments(request: Request, seeds: Seeds) -> Iterator[memoryview]:
    """The bytes of the answer to a checked request, in pieces, each computed when it is asked for. `seeds` may raise Refusal."""
    ring: Any = (FIELDS if request.mersenne else RINGS)[request.width]
    if request.kind == "AdjustDot":
        yield ring.data(_product(ring, request, seeds))
    elif request.kind == "AdjustPerm":
        yield ring.data(_permuted(ring, request, seeds))
    else:
        # SPU's client reads the whole of a request's first array before its second.
        for each in _ELEMENTWISE[request.kind]:
            yield from _elementwise(ring, each, request, seeds)


def _elementwise(ring: Any, kind: _Elementwise, request: Request, seeds: Seeds) -> Iterator[memoryview]:
    joined = kind.joined or ("add",) * len(kind.of)
    masks = [_Mask(ring, request.inputs[i], join, seeds) for i, join in zip(kind.of, joined, strict=True)]
    left, piece = request.inputs[0].size // request.width, _PIECE // request.width
    while left:
        n = min(left, piece)
        left -= n
        yield ring.data(kind.make(ring, request.bits, *(mask.take(n) for mask in masks)))


class _Mask:
    """What the parties' shares of one input make, joined, read from the beginning."""

    def __init__(self, ring: Arithmetic, drawn: Drawn, join: str, seeds: Seeds):
        self._ring = ring
        self._join = np.bitwise_xor if join == "xor" else getattr(ring, join)
        self._streams = [ring.stream(seeds(each), drawn.count) for each in drawn.seeds]

    def take(self, n: int) -> np.ndarray:
        return reduce(self._join, (self._ring.sample(stream, n) for stream in self._streams))


def _whole(ring: Any, drawn: Drawn, seeds: Seeds) -> np.ndarray:
    return _Mask(ring, drawn, "add", seeds).take(drawn.size // ring.width)


def _product(ring: Any, request: Request, seeds: Seeds) -> np.ndarray:
    m, n, k = request.shape
    shapes, masks = ((m, k), (k, n), (m, n)), []
    for drawn, shape, transposed in zip(request.inputs, shapes, request.transposed, strict=True):
        drawn_shape = shape[::-1] if transposed else shape
        mask = ring.shaped(_whole(ring, drawn, seeds), *drawn_shape)
        masks.append(mask.swapaxes(0, 1) if transposed else mask)
    a, b, c = masks
    return ring.subtract(ring.matmul(a, b), c)


def _permuted(ring: Any, request: Request, seeds: Seeds) -> np.ndarray:
    a, b = (_whole(ring, drawn, seeds) for drawn in request.inputs)
    assert request.permuted is not None  # checked
    moved = np.empty_like(a)
    moved[permutation(seeds(request.permuted.seed), request.permuted.count, request.permuted.n)] = a
    return ring.subtract(moved, b)
