"""Tables of local polynomials: a smooth function on an interval, to be looked up with one opening."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, comb, log2
from typing import Any

import numpy as np

_MOST_ROTATED = 512
_EXACT_BITS = 53  # integers that a float64 product sum holds exactly


@dataclass(frozen=True, eq=False)
class Table:
    """A function f in numpy (`function`) and in JAX for stock SPU (`stock`), on [low, low + (segments - 1) * width].

    It is given by polynomials of `degree` on segments of width 2^width_bits / factor. `segments` is a power of two: the
    table has period segments * width, and gives a wrong value outside its range.
    Coefficients are rounded to `bits` fraction bits and the place within a segment to `place_bits`; the output has
    `output_bits` = bits + 2 * place_bits fraction bits, untruncated.
    """

    function: Callable[[np.ndarray], np.ndarray]
    stock: Callable[[Any], Any]
    low: float
    segments: int
    width_bits: int
    degree: int
    bits: int = 14
    place_bits: int = 10
    factor: int = 1

    def __post_init__(self) -> None:
        if self.segments < 2 or self.segments & (self.segments - 1):
            raise ValueError(f"a table has {self.segments} segments; use a power of two, at least 2")
        if not 0 <= self.degree <= 12:
            raise ValueError(f"a table of degree {self.degree}; use 0 to 12")

    @property
    def width(self) -> float:
        return 2.0**self.width_bits / self.factor

    @property
    def high(self) -> float:
        """The largest input. The last segment is not usable: a borrow there would select the first one."""
        return self.low + (self.segments - 1) * self.width

    @property
    def output_bits(self) -> int:
        return self.bits + 2 * self.place_bits

    @property
    def spread(self) -> bool:
        """Whether the parties keep the one-hot as it is: turning the tables of so many segments would cost more than it saves."""
        return self.segments > _MOST_ROTATED

    @property
    def depth(self) -> int:
        return self.segments.bit_length() - 1

    @property
    def modulus(self) -> int:
        """Bits that an output needs: the rotated table is computed modulo 2^modulus, and two bits are left for a lift."""
        return self.output_bits + ceil(log2(self.limits[1] + 1)) + 3

    @property
    def payload_words(self) -> int:
        """Ring words of one row of the rotated table."""
        return self.degree + 1

    @property
    def words(self) -> int:
        """Ring words of the rotated table of one element."""
        return self.segments * self.payload_words

    @cached_property
    def coefficients(self) -> np.ndarray:
        """[segments, degree + 1] int64 with `bits` fraction bits: powers of the place u in (-1, 1) around each left edge."""
        u = np.cos(np.pi * (np.arange(8 * (self.degree + 1)) + 0.5) / (8 * (self.degree + 1)))
        edges = self.low + np.arange(self.segments) * self.width
        values = self.function(edges + u[:, None] * self.width)
        if not np.all(np.isfinite(values)):
            raise ValueError(f"the table's function is not finite on [{self.low}, {self.high}]; give it tails")
        fitted = np.polynomial.polynomial.polyfit(u, values, self.degree) if self.degree else self.function(edges)[None]
        return np.round(fitted.T * 2.0**self.bits).astype(np.int64)

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The least and largest value the table gives."""
        size = np.abs(self.coefficients).sum(-1).max() / 2.0**self.bits
        return -float(size), float(size)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        """What the protocol computes, up to the rounding of the place: real numbers in and out."""
        position = (np.asarray(x, np.float64) - self.low) / self.width
        edge = np.floor(position).astype(np.int64)
        row = self.coefficients[edge & (self.segments - 1)]
        powers = (position - edge)[..., None] ** np.arange(self.degree + 1)
        return np.sum(row * powers, -1) / 2.0**self.bits

    def payload(self, place: np.ndarray) -> np.ndarray:
        """[..., degree + 1] powers of minus the mask's place within its segment, `place_bits` fraction bits each."""
        unit = 2.0**-self.place_bits
        return np.stack([np.round((-place * unit) ** q / unit).astype(np.int64) for q in range(self.degree + 1)], -1)

    def factors(self, place: Any) -> list[Any]:
        """What the words of a picked row are multiplied by: powers of the public place, `place_bits` fraction bits each.

        place: int64, numpy or JAX.
        """
        found = [place * 0 + (1 << self.place_bits)]
        for _ in range(self.degree):
            found.append(found[-1] * place >> self.place_bits)
        return found

    def row(self, segment: np.ndarray, payload: np.ndarray) -> list[np.ndarray]:
        """One row of a rotated table in the clear, a column each: the one `segment` rows above the one-hot's, for its payload."""
        rows, words = self.coefficients.T[:, segment], range(self.degree + 1)
        return [sum(comb(p, i) * rows[p] * payload[..., p - i] for p in words[i:]) for i in words]

    def rotate(self, spread: np.ndarray, modulus: int) -> np.ndarray:
        """A party's share of the one-hot times payload [n, segments, payload_words] -> its share of the rotated table.

        Row k, column i is sum_{p >= i} C(p, i) a_p[k - r] (-place)^(p - i), modulo 2^modulus: a linear map, done in float64
        matrix products on limbs small enough to be exact.
        """
        matrices, limb = self._maps
        out = np.zeros(spread.shape, np.int64)
        ordered = np.ascontiguousarray(spread.transpose(0, 2, 1))  # [n, words, segments]: column i needs the first words only
        for start in range(0, modulus, limb):
            part = ordered >> start if start + limb >= 64 else (ordered >> start) & ((1 << limb) - 1)
            real = part.astype(np.float64)
            for i, matrix in enumerate(matrices):
                products = real[:, : self.payload_words - i].reshape(len(real), len(matrix)) @ matrix
                out[:, :, i] += products.astype(np.int64) << start
        return out

    @cached_property
    def _maps(self) -> tuple[list[np.ndarray], int]:
        """For each column of the rotated table a matrix from payload words and segments, and the limb that keeps it exact."""
        k = self.segments
        distance = (np.arange(k)[None, :] - np.arange(k)[:, None]) & (k - 1)
        coefficients = self.coefficients.astype(np.float64)
        matrices = [
            np.concatenate([comb(p, i) * coefficients[distance, p] for p in range(i, self.degree + 1)])
            for i in range(self.degree + 1)
        ]
        return matrices, _limb(matrices)


@dataclass(frozen=True, eq=False)
class ExponentialTable(Table):
    """exp on a wide range by one word a segment: exp(edge + c - u) = exp(edge) exp(c) exp(-u), for the public place c and the
    mask's place u in a segment.

    So the dealer's payload is exp(-u), everyone computes exp(c) by a polynomial of `degree`, and nothing else is shared. (After
    SOAL's exponential, where each party forms its factor of 2^fraction on its own.)
    """

    largest: float = 8.0  # values above exp(largest) are cut to its size, with the error of one segment

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread:
            raise ValueError(f"an exponential table has {self.segments} segments; use at most {_MOST_ROTATED}")

    @property
    def payload_words(self) -> int:
        return 1

    @cached_property
    def _scales(self) -> np.ndarray:
        """[segments] exp at the left edges, `bits` fraction bits."""
        edges = self.low + np.arange(self.segments) * self.width
        return np.round(np.exp(np.minimum(edges, self.largest)) * 2.0**self.bits)

    @cached_property
    def _public_series(self) -> list[int]:
        """Polynomial of exp(place * width) for a place in [0, 1), `place_bits` fraction bits."""
        nodes = 0.5 + 0.5 * np.cos(np.pi * (np.arange(8 * (self.degree + 1)) + 0.5) / (8 * (self.degree + 1)))
        fitted = np.polynomial.polynomial.polyfit(nodes, np.exp(nodes * self.width), self.degree)
        return [round(a * 2.0**self.place_bits) for a in fitted]

    @cached_property
    def coefficients(self) -> np.ndarray:
        u = np.cos(np.pi * (np.arange(8 * (self.degree + 1)) + 0.5) / (8 * (self.degree + 1)))
        series = np.polynomial.polynomial.polyfit(u, np.exp(u * self.width), self.degree)
        return np.round(self._scales[:, None] * series).astype(np.int64)

    def payload(self, place: np.ndarray) -> np.ndarray:
        unit = 2.0**-self.place_bits
        return np.round(np.exp(-place * unit * self.width) / unit).astype(np.int64)[..., None]

    def factors(self, place: Any) -> list[Any]:
        *rest, total = self._public_series
        for a in reversed(rest):
            total = (total * place >> self.place_bits) + a
        return [total]

    def row(self, segment: np.ndarray, payload: np.ndarray) -> list[np.ndarray]:
        return [self._scales.astype(np.int64)[segment] * payload[..., 0]]

    @cached_property
    def _maps(self) -> tuple[list[np.ndarray], int]:
        k = self.segments
        distance = (np.arange(k)[None, :] - np.arange(k)[:, None]) & (k - 1)
        matrix = self._scales[distance]
        return [matrix], _limb([matrix])


def _limb(matrices: list[np.ndarray]) -> int:
    return _EXACT_BITS - ceil(log2(max(np.abs(matrix).sum(0).max() for matrix in matrices) + 1))
