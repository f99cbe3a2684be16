"""What a CKKS ciphertext holds, and how many levels a bootstrap leaves: all that the schedule knows of the scheme."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class CkksParameters:
    """A ring of degree 2^log_ring; values in its slots, at scale 2^scale_bits; a modulus of one prime a level above the first.

    `levels` is what a ciphertext has after a bootstrap, `reserve` what a bootstrap's input must still have. The bootstrap's own
    levels and the primes for switching keys count in the modulus, not in `levels`. `message_ratio_bits`: first prime over the
    largest value's scale, what the bootstrap's modular reduction needs to be nearly linear. A bootstrap may divide its input by
    2^correction_bits first and multiply its result by as much: a larger input for a larger error. `transform_levels`: what a
    bootstrap spends in each of its two transforms. `digits`: parts of a ciphertext when its key is switched; more need fewer bits
    of `switching_bits` and more time. `few_keys`: for rotations by powers of two alone, log2(slots) of them in place of about
    2 sqrt(slots), for more time. `slots` is half the ring unless given.
    """

    log_ring: int = 16
    levels: int = 10
    reserve: int = 0
    scale_bits: int = 40
    first_bits: int = 60
    bootstrap_bits: int = 821
    switching_bits: int = 183
    hamming_weight: int = 192
    message_ratio_bits: int = 8
    correction_bits: int = 0
    transform_levels: int = 3
    digits: int = 3
    few_keys: bool = False
    slots: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for a scheme in which nothing could be computed."""
        if not 4 <= self.log_ring <= 17:
            raise UserError(f"ring 2^{self.log_ring}: bootstraps are known for 2^4 to 2^17; give another ring")
        if self.slots == 0:
            object.__setattr__(self, "slots", self.ring // 2)
        if not 1 <= self.slots <= self.ring // 2 or self.slots & (self.slots - 1):
            raise UserError(
                f"{self.slots} slots: a ring of 2^{self.log_ring} has a power of two of them, 2^{self.log_ring - 1} at most"
            )
        if self.reserve < 0 or self.levels - self.reserve < 1:
            raise UserError(
                f"{self.levels} levels, {self.reserve} of them reserved: none is left to compute with; give more levels"
            )
        if self.first_bits - self.scale_bits + self.correction_bits - self.message_ratio_bits < 1:
            raise UserError(
                f"scale 2^{self.scale_bits} under a first prime of {self.first_bits} bits: no value fits; lower the scale"
            )

    @property
    def ring(self) -> int:
        return 2**self.log_ring

    @property
    def usable(self) -> int:
        """Levels that can be spent between two bootstraps."""
        return self.levels - self.reserve

    @property
    def modulus_bits(self) -> int:
        """Of the whole modulus: first prime, levels, the bootstrap's own levels, primes for switching keys."""
        return self.first_bits + self.levels * self.scale_bits + self.bootstrap_bits + self.switching_bits

    @property
    def largest(self) -> float:
        """Largest absolute value that a bootstrap's input may hold."""
        return 2.0 ** (self.first_bits - self.scale_bits + self.correction_bits - self.message_ratio_bits)


PAPER = CkksParameters()
"""Ring 2^16 and h = 192 as the paper has them. It gives 1465 bits of modulus; we count 1464: a first prime of 60 bits, 10 levels of
40, the public default bootstrap for this ring and weight (3 x 39 + 8 x 60 + 4 x 56, Bossuat et al., EUROCRYPT 2021 and ACNS 2022)
and three primes of 61. With five such primes the same modulus leaves 7 levels."""

OPENFHE = CkksParameters(reserve=1)
"""The same levels where a bootstrap's input must keep one, as OpenFHE's must."""

TOY = CkksParameters(
    11, levels=11, reserve=1, scale_bits=59, bootstrap_bits=16 * 59, switching_bits=10 * 60, correction_bits=9, message_ratio_bits=6
)
"""A ring for tests and first runs: NOT SECURE. Ten levels to spend, as `PAPER`; OpenFHE's bootstrap takes sixteen of its own."""

SECURE = CkksParameters(
    levels=8, reserve=1, scale_bits=56, bootstrap_bits=16 * 56, switching_bits=5 * 60, correction_bits=6, message_ratio_bits=6,
    digits=5, few_keys=True, slots=1024,
)  # fmt: skip
"""128 bits by the standard's tables, which allow 1747 bits at this ring: seven levels to spend. Ring 2^15 allows 881 bits, so
scales of 34 bits, at which a bootstrap errs by more than 1."""

PRESETS = {"paper": PAPER, "openfhe": OPENFHE, "toy": TOY, "secure": SECURE}
