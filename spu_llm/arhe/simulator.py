"""CKKS on plaintext vectors: every level, scale and range is kept as the scheme would, nothing is encrypted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .backend import LevelViolation, RangeViolation
from .parameters import CkksParameters
from .slots import SlotMap

_SAME_SCALE = 1e-9
"""Scales further apart than this, relatively, are not added: the sum would err by as much."""
_TOLERANCE = 1e-6
"""By which a value may exceed a bound through rounding."""
_DRIFT_BITS = 0.5
"""By which a level's scale may stray from the nominal one."""


@dataclass(frozen=True)
class Simulated:
    """Values of all slots; scale: what a plaintext 1 is encoded as."""

    values: np.ndarray
    level: int
    scale: float


class Simulator:
    """A `Backend` of float64 vectors.

    Each level has its own prime, as in a real modulus, so scales after a product differ from level to level; operands must agree
    in level and scale, or LevelViolation is raised, as it is below level 0 (or the reserve, before a bootstrap).
    """

    def __init__(self, parameters: CkksParameters):
        self.parameters = parameters
        self.bootstraps = 0
        self.lowest = parameters.levels
        self._primes = primes(parameters.log_ring, parameters.scale_bits, parameters.levels)
        self.scales = _scales(self._primes, parameters.scale_bits)
        if any(abs(np.log2(scale) - parameters.scale_bits) > _DRIFT_BITS for scale in self.scales):
            raise LevelViolation(f"scales from 2^{parameters.scale_bits} drift apart over {parameters.levels} levels")

    def encrypt(self, values: np.ndarray) -> Simulated:
        if len(values) > self.parameters.slots:
            raise ValueError(f"{len(values)} values do not fit {self.parameters.slots} slots")
        return self._fresh(np.pad(np.asarray(values, np.float64), (0, self.parameters.slots - len(values))))

    def decrypt(self, x: Simulated) -> np.ndarray:
        return x.values

    def level(self, x: Simulated) -> int:
        return x.level

    def lower(self, x: Simulated, level: int) -> Simulated:
        """Multiplied by a 1 whose scale mends the difference between the levels' scales."""
        if level == x.level:
            return x
        if level > x.level:
            raise LevelViolation(f"a ciphertext at level {x.level} cannot be raised to {level}")
        return self._made(x.values, level, self.scales[level])

    def add(self, x: Simulated, y: Simulated) -> Simulated:
        self._agree(x, y)
        return self._made(x.values + y.values, x.level, x.scale)

    def subtract(self, x: Simulated, y: Simulated) -> Simulated:
        self._agree(x, y)
        return self._made(x.values - y.values, x.level, x.scale)

    def rotate(self, x: Simulated, steps: int) -> Simulated:
        return self._made(np.roll(x.values, -steps), x.level, x.scale)

    def add_constant(self, x: Simulated, constant: float) -> Simulated:
        return self._made(x.values + constant, x.level, x.scale)

    def multiply(self, x: Simulated, y: Simulated) -> Simulated:
        self._agree(x, y)
        return self._rescaled(x.values * y.values, x.level, x.scale * y.scale)

    def multiply_constant(self, x: Simulated, constant: float) -> Simulated:
        return self._rescaled(x.values * constant, x.level, x.scale * self._plain_scale(x))

    def linear(self, inputs: Sequence[Simulated], slot_map: SlotMap) -> list[Simulated]:
        first, slots = inputs[0], self.parameters.slots
        for other in inputs[1:]:
            self._agree(first, other)
        scale = first.scale * self._plain_scale(first)
        found = slot_map.applied(np.concatenate([x.values for x in inputs]), slots)
        return [self._rescaled(part, first.level, scale) for part in found.reshape(-1, slots)]

    def bootstrap(self, x: Simulated) -> Simulated:
        if x.level < self.parameters.reserve:
            raise LevelViolation(f"a bootstrap at level {x.level} needs {self.parameters.reserve}")
        self.within(x, self.parameters.largest)
        self.bootstraps += 1
        return self._fresh(x.values)

    def within(self, x: Simulated, bound: float) -> None:
        largest = float(np.abs(x.values).max(initial=0.0))
        if not largest <= bound + _TOLERANCE:
            raise RangeViolation(largest, bound)

    def _plain_scale(self, x: Simulated) -> float:
        """Of a plaintext factor, so that the product has the next level's scale."""
        return self.scales[max(x.level - 1, 0)] * self._primes[x.level - 1] / x.scale

    def _fresh(self, values: np.ndarray) -> Simulated:
        return self._made(values, self.parameters.levels, self.scales[self.parameters.levels])

    def _rescaled(self, values: np.ndarray, level: int, scale: float) -> Simulated:
        if level < 1:
            raise LevelViolation("a product at level 0")
        return self._made(values, level - 1, scale / self._primes[level - 1])

    def _made(self, values: np.ndarray, level: int, scale: float) -> Simulated:
        """Checked against what the modulus at this level can hold."""
        if level < self.parameters.reserve:
            raise LevelViolation(f"level {level} is below the {self.parameters.reserve} that a bootstrap needs")
        made = Simulated(values, level, scale)
        bits = self.parameters.first_bits + level * self.parameters.scale_bits
        self.within(made, 2.0 ** (bits - 1 - self.parameters.scale_bits))
        self.lowest = min(self.lowest, level)
        return made

    @staticmethod
    def _agree(x: Simulated, y: Simulated) -> None:
        if x.level != y.level or abs(x.scale / y.scale - 1) > _SAME_SCALE:
            raise LevelViolation(f"operands at levels {x.level} and {y.level}, scales {x.scale:.9g} and {y.scale:.9g}")


def _scales(moduli: Sequence[int], bits: int) -> list[float]:
    """The scale of each level, lowest first: nominal at the top, then what a product of two such leaves after rescaling."""
    found = [2.0**bits]
    for prime in reversed(moduli):
        found.append(found[-1] ** 2 / prime)
    return found[::-1]


@lru_cache
def primes(log_ring: int, bits: int, count: int) -> tuple[int, ...]:
    """Primes 1 modulo twice the ring's degree, in turn above and below 2^bits and nearest to it: scales stay near 2^bits."""
    step, middle = 2 ** (log_ring + 1), 2**bits
    found: tuple[list[int], list[int]] = ([], [])
    for side, direction in enumerate((1, -1)):
        candidate = middle + 1 + (direction - 1) // 2 * step
        while len(found[side]) < (count + 1) // 2:
            if _is_prime(candidate):
                found[side].append(candidate)
            candidate += direction * step
    return tuple(prime for pair in zip(*found, strict=True) for prime in pair)[:count]


def _is_prime(n: int) -> bool:
    """Miller and Rabin's test with bases that decide every n below 3.3e24 (Sorenson and Webster 2015)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    odd = n - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    return all(_passes(n, pow(base, odd, n), twos) for base in bases)


def _passes(n: int, x: int, twos: int) -> bool:
    return x in (1, n - 1) or any((x := x * x % n) == n - 1 for _ in range(twos - 1))
