"""What the executor asks of a CKKS implementation: the simulator is one, OpenFHE's binding the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .parameters import CkksParameters
from .slots import SlotMap

Ciphertext = Any
"""Whatever the backend makes of a vector of `slots` values."""


class Backend(Protocol):
    """Operations on ciphertexts. Levels are the caller's care: operands of one operation have equal levels."""

    parameters: CkksParameters
    bootstraps: int

    def encrypt(self, values: np.ndarray) -> Ciphertext:
        """A fresh ciphertext of at most `slots` values, 0 in the other slots, at the level a bootstrap leaves."""

    def decrypt(self, x: Ciphertext) -> np.ndarray:
        """All slots: the client's alone."""

    def level(self, x: Ciphertext) -> int: ...

    def lower(self, x: Ciphertext, level: int) -> Ciphertext:
        """The same values at a lower level and at its scale."""

    def add(self, x: Ciphertext, y: Ciphertext) -> Ciphertext: ...

    def subtract(self, x: Ciphertext, y: Ciphertext) -> Ciphertext: ...

    def rotate(self, x: Ciphertext, steps: int) -> Ciphertext:
        """Every value `steps` slots to the left, the first ones to the end; no level."""

    def add_constant(self, x: Ciphertext, constant: float) -> Ciphertext: ...

    def multiply(self, x: Ciphertext, y: Ciphertext) -> Ciphertext:
        """Slot by slot; one level."""

    def multiply_constant(self, x: Ciphertext, constant: float) -> Ciphertext:
        """One level."""

    def linear(self, inputs: Sequence[Ciphertext], slot_map: SlotMap) -> list[Ciphertext]:
        """The map of the inputs end to end; slots that it does not write become 0; one level."""

    def bootstrap(self, x: Ciphertext) -> Ciphertext:
        """The same values at `parameters.levels`; counted in `bootstraps`."""

    def within(self, x: Ciphertext, bound: float) -> None:
        """Raise RangeViolation where a value is known to exceed the bound; a real ciphertext tells nothing."""


class LevelViolation(RuntimeError):
    """A ciphertext without the levels, or at another level or scale than, its operation needs: a defect of the schedule."""


class RangeViolation(RuntimeError):
    """A value beyond what its operation was made for."""

    def __init__(self, value: float, bound: float):
        super().__init__(f"{value:.4g} exceeds {bound:.4g}")
        self.value, self.bound = value, bound


def aligned(backend: Backend, ciphertexts: Sequence[Ciphertext]) -> list[Ciphertext]:
    """The ciphertexts, all at the lowest one's level."""
    level = min(backend.level(x) for x in ciphertexts)
    return [backend.lower(x, level) for x in ciphertexts]


def repeated(backend: Backend, x: Ciphertext, step: int, count: int) -> Ciphertext:
    """The sum over i < count of x rotated i times by `step`, in about log2(count) rotations.

    A negative step copies what begins the slots to the right, a positive one adds up what stands there.
    """
    if count == 1:
        return x
    half = repeated(backend, x, step, count // 2)
    found = backend.add(half, backend.rotate(half, count // 2 * step))
    return found if count % 2 == 0 else backend.add(backend.rotate(found, step), x)


def evaluate_series(backend: Backend, x: Ciphertext, coefficients: np.ndarray) -> Ciphertext:
    """A Chebyshev series of x, |x| <= 1, in ceil(log2(degree + 1)) levels.

    p = q T_m + r with m the largest power of two up to p's degree, down to degree 1 (Paterson and Stockmeyer 1973, for
    Chebyshev's basis): about degree / 2 products.
    """
    powers = {1: x}

    def power(m: int) -> Ciphertext:
        """T_m = 2 T_(m/2)^2 - 1."""
        if m not in powers:
            half = power(m // 2)
            square = backend.multiply(half, half)
            powers[m] = backend.add_constant(backend.add(square, square), -1.0)
        return powers[m]

    def value(c: np.ndarray) -> Ciphertext:
        degree = len(c) - 1
        if degree == 1:
            return backend.add_constant(backend.multiply_constant(x, float(c[1])), float(c[0]))
        m = 1 << (degree.bit_length() - 1)
        quotient, rest = _divided(c, m)
        if len(quotient) == 1:
            product = backend.multiply_constant(power(m), float(quotient[0]))
        else:
            product = backend.multiply(*aligned(backend, [value(quotient), power(m)]))
        return backend.add(*aligned(backend, [product, value(rest)]))

    return value(np.asarray(coefficients, np.float64))


def _divided(c: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """q, r with sum c_k T_k = q T_m + r and r of degree below m: T_(m+j) = 2 T_m T_j - T_(m-j)."""
    quotient, rest = c[m:].copy(), c[:m].copy()
    quotient[1:] *= 2
    for j in range(1, len(quotient)):
        rest[m - j] -= c[m + j]
    return quotient, rest
