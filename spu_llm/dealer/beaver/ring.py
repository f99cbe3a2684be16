"""Arithmetic of SPU's rings Z_2^32, Z_2^64 and Z_2^128, and of the fields of Mersenne primes that its exponential uses.

Elements lie in arrays as in SPU's memory, little-endian: uint32 or uint64 [n], for 128 bits uint64 [n, 2] (low word, high word).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .prg import BlockStream, CounterStream, Stream

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


class Arithmetic(Protocol):
    """What masks are drawn in."""

    width: int
    """Bytes of an element."""

    def stream(self, seed: bytes, count: int) -> Stream: ...
    def sample(self, stream: Stream, n: int) -> np.ndarray:
        """The next n elements that a party draws from its stream."""
        ...

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray: ...
    def subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray: ...
    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray: ...
    def data(self, a: np.ndarray) -> memoryview:
        """An array's bytes as SPU reads them."""
        ...


class _Ring:
    width: int

    def stream(self, seed: bytes, count: int) -> Stream:
        return BlockStream(seed, count)

    def data(self, a: np.ndarray) -> memoryview:
        return np.ascontiguousarray(a).data.cast("B")


class Ring(_Ring):
    """Z_2^32 or Z_2^64."""

    def __init__(self, width: int):
        self.width = width
        self.bits = 8 * width
        self._type = np.dtype(f"<u{width}")

    def sample(self, stream: Stream, n: int) -> np.ndarray:
        return stream.take(n * self.width).view(self._type)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b

    def subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a - b

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def left(self, a: np.ndarray, bits: int) -> np.ndarray:
        return a << self._type.type(bits)

    def right(self, a: np.ndarray, bits: int) -> np.ndarray:
        return a >> self._type.type(bits)

    def right_signed(self, a: np.ndarray, bits: int) -> np.ndarray:
        """Shift right; the sign fills from the left."""
        signed = a.view(f"<i{self.width}")
        return (signed >> signed.dtype.type(bits)).view(self._type)

    def bits_of(self, bits: np.ndarray) -> np.ndarray:
        """Elements 0 and 1 of a uint8 array of bits."""
        return bits.astype(self._type)

    def shaped(self, a: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return a.reshape(rows, columns)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # numpy multiplies integers without BLAS: quicker for a few rows or columns, many times slower beyond.
        if min(len(a), b.shape[1]) <= _FEW:
            return a @ b
        total = np.zeros((len(a), b.shape[1]), np.uint64)
        for shift, product in _limb_products(_limbs(a[..., None]), _limbs(b[..., None])):
            total += product << np.uint64(shift)
        return total.astype(self._type)


class WideRing(_Ring):
    """Z_2^128."""

    width = 16
    bits = 128

    def sample(self, stream: Stream, n: int) -> np.ndarray:
        return stream.take(n * self.width).view("<u8").reshape(n, 2)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        low = a[..., 0] + b[..., 0]
        return _words(low, a[..., 1] + b[..., 1] + (low < a[..., 0]))

    def subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _words(a[..., 0] - b[..., 0], a[..., 1] - b[..., 1] - (a[..., 0] < b[..., 0]))

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        low, high = _product(a[..., 0], b[..., 0])
        return _words(low, high + a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0])

    def left(self, a: np.ndarray, bits: int) -> np.ndarray:
        if bits >= 64:
            return _words(np.zeros_like(a[..., 0]), a[..., 0] << np.uint64(bits - 64))
        return _words(a[..., 0] << np.uint64(bits), _funnel(a[..., 1], a[..., 0], 64 - bits))

    def right(self, a: np.ndarray, bits: int) -> np.ndarray:
        if bits >= 64:
            return _words(a[..., 1] >> np.uint64(bits - 64), np.zeros_like(a[..., 0]))
        return _words(_funnel(a[..., 1], a[..., 0], bits), a[..., 1] >> np.uint64(bits))

    def right_signed(self, a: np.ndarray, bits: int) -> np.ndarray:
        """Shift right; the sign fills from the left."""
        high = np.ascontiguousarray(a[..., 1]).view("<i8")
        if bits >= 64:
            return _words((high >> np.int64(bits - 64)).view("<u8"), (high >> np.int64(63)).view("<u8"))
        return _words(_funnel(a[..., 1], a[..., 0], bits), (high >> np.int64(bits)).view("<u8"))

    def bits_of(self, bits: np.ndarray) -> np.ndarray:
        """Elements 0 and 1 of a uint8 array of bits."""
        low = bits.astype("<u8")
        return _words(low, np.zeros_like(low))

    def shaped(self, a: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return a.reshape(rows, columns, 2)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((len(a), b.shape[1], 2), "<u8")
        for shift, product in _limb_products(_limbs(a), _limbs(b)):
            total = self.add(total, self.left(_words(product, np.zeros_like(product)), shift))
        return total


class Mersenne:
    """The prime field of 2^31 - 1, 2^61 - 1 or 2^127 - 1, held in 4, 8 or 16 bytes; here always in two words.

    How elements are drawn is yacl's `FillPRandWithMersennePrime`: within 2^-40 of uniform.
    """

    def __init__(self, width: int):
        self.width = width
        self.bits = {4: 31, 8: 61, 16: 127}[width]
        prime = (1 << self.bits) - 1
        self._prime = np.array([prime & (2**64 - 1), prime >> 64], "<u8")

    def stream(self, seed: bytes, count: int) -> Stream:
        return CounterStream(seed, count)

    def sample(self, stream: Stream, n: int) -> np.ndarray:
        if self.width == 4:  # 72 bits: 32, and 40 more that make the remainder nearly uniform
            drawn = np.zeros((n, 16), np.uint8)
            drawn[:, :9] = stream.take(9 * n).reshape(n, 9)
            return self._fold(drawn.view("<u8"))
        drawn = np.zeros((n, 16), np.uint8)
        drawn[:, : self.width] = stream.take(self.width * n).reshape(n, self.width)
        return self._fold(drawn.view("<u8") & self._prime)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._fold(WideRing().add(a, b))

    def subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.add(a, WideRing().subtract(np.broadcast_to(self._prime, b.shape), b))

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        ring = WideRing()
        low, carry = _product(a[:, 0], b[:, 0])
        middle = ring.add(_words(*_product(a[:, 0], b[:, 1])), _words(*_product(a[:, 1], b[:, 0])))  # below 2^128
        high = _words(*_product(a[:, 1], b[:, 1]))
        middle = ring.add(middle, _words(carry, np.zeros_like(carry)))
        high = ring.add(high, _words(middle[:, 1], np.zeros_like(carry)))
        bottom = _words(low, middle[:, 0])
        # x = top * 2^bits + rest, and 2^bits is 1 modulo the prime
        top = ring.add(ring.left(high, 128 - self.bits), ring.right(bottom, self.bits))
        return self._fold(ring.add(bottom & self._prime, top))

    def data(self, a: np.ndarray) -> memoryview:
        return np.ascontiguousarray(np.ascontiguousarray(a).view(np.uint8)[:, : self.width]).data.cast("B")

    def _fold(self, x: np.ndarray) -> np.ndarray:
        """Remainders of numbers of 128 bits."""
        ring = WideRing()
        for _ in range(2 if self.bits > 32 else 4):  # bits above the prime's move to the bottom; what is left is at most the prime
            x = ring.add(x & self._prime, ring.right(x, self.bits))
        return np.where((x == self._prime).all(-1, keepdims=True), np.uint64(0), x)


RINGS: dict[int, Ring | WideRing] = {4: Ring(4), 8: Ring(8), 16: WideRing()}
FIELDS = {width: Mersenne(width) for width in RINGS}

_FEW = 8  # rows or columns; beyond, the products of limbs take less time
_LIMB = 16  # bits


def _words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack((low, high), -1)


def _funnel(high: np.ndarray, low: np.ndarray, bits: int) -> np.ndarray:
    """Bits [bits, bits + 64) of high * 2^64 + low, 0 <= bits <= 64."""
    if bits == 0:
        return low
    if bits == 64:
        return high
    return (low >> np.uint64(bits)) | (high << np.uint64(64 - bits))


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high word of products of words."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    lowest, cross = a0 * b0, a1 * b0
    middle = a0 * b1 + (cross & _LOW) + (lowest >> _HALF)
    return a * b, a1 * b1 + (cross >> _HALF) + (middle >> _HALF)


def _limbs(a: np.ndarray) -> list[np.ndarray]:
    """float64 matrices of 16 bits each, lowest first, of unsigned words [rows, columns, words]."""
    parts = np.ascontiguousarray(a).view("<u2")
    return [np.ascontiguousarray(parts[..., i], np.float64) for i in range(parts.shape[-1])]


def _limb_products(a: list[np.ndarray], b: list[np.ndarray]):
    """(shift, uint64 matrix) pairs whose sum, each shifted left, is the matrix product modulo 2^(16 limbs).

    float64 adds up products of 16-bit limbs exactly while there are fewer than 2^21, so longer sums are cut.
    """
    longest = (1 << 53 - 2 * _LIMB) // len(a)
    inner = a[0].shape[1]
    for start in range(0, inner, longest):
        cut = slice(start, start + longest)
        for i in range(len(a)):
            real = sum(a[j][:, cut] @ b[i - j][cut] for j in range(i + 1))
            yield _LIMB * i, real.astype(np.uint64)
