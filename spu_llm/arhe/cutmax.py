"""The argmax without comparisons: powers amplify what the largest logit is ahead by, until one share of the whole is left.

CutMax (Avitan et al., arXiv 2509.08383) cuts below the mean, divides by the standard deviation, raises to an odd power, and again.
This is its idea for the logits of language models, with three changes. The mean costs nothing here: it is folded into the head. The
standard deviation tells little of the largest logit, so that powers of the quotient would spread over many orders of magnitude; the
p-th root of the sum of p-th powers does, to a factor of the p-th root of the number of close competitors, and S^(-1/p) is so flat
that a polynomial of low degree follows it over a wide range. And once the largest is known to be near 1, what is divided by is the
sum of the powers themselves: the shares that remain add up to 1, and a short sign tells which one is more than a half.

A round on x, in all slots of its ciphertexts: squares of squares give x^p; a fold adds all slots; a constant moves the sum into the
domain of its series, whose width the values were scaled for; the series, on one ciphertext, multiplies all. A *cut* multiplies x by
S^(-1/p) and takes a constant from it; a *share* multiplies x^p by 1 / S. Nothing is masked: slots beyond the vocabulary hold what
the first cut brings to about 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.polynomial import chebyshev

from .polynomials import Degrees, Series, fit, fit_reciprocal, sign_series

Kind = Literal["product", "fold", "series", "shift"]

_DEEPEST = 0.6
"""How far below 0 a cut may bring values, over how far above 0 the largest is: their powers, which are positive, must vanish."""
_TIES, _CROWD = 0.05, 4
_LEAST = 1e-12  # of the largest sum: where powers vanish no series follows them, and nothing is resolved
_GRID = 4096
_TRIED = 128
_SURE = 0.95
_ERROR = 0.01


class Step(NamedTuple):
    """An operation of a round, as `graph.Op`. `wide`: on all candidates' slots, else on one ciphertext's; `degree`: of a series."""

    block: str
    name: str
    kind: Kind
    inputs: tuple[str, ...]
    wide: bool = True
    degree: int = 0


class Round(NamedTuple):
    """`squarings` of what a round takes; `cut`: whether it scales its values, not their powers; `degree` of its factor's series."""

    name: str
    squarings: int
    cut: bool
    degree: int


def rounds(degrees: Degrees) -> list[Round]:
    """Cuts first."""
    cuts = [Round(f"cut{i}", squarings, True, degrees.cut_factor) for i, squarings in enumerate(degrees.cuts)]
    return cuts + [Round(f"share{i}", squarings, False, degrees.share_factor) for i, squarings in enumerate(degrees.shares)]


def steps(degrees: Degrees, x: str) -> Iterator[Step]:
    """Rounds on the logits `x`; the last step's result is twice each share less 1."""
    for name, squarings, cut, degree in rounds(degrees):
        block, power = f"{name}/power", x
        for i in range(squarings):
            yield Step(block, f"{name}.square{i}", "product", (power, power))
            power = f"{name}.square{i}"
        yield Step(block, f"{name}.sum", "fold", (power,), wide=False)
        block = f"{name}/scale"
        yield Step(block, f"{name}.about", "shift", (f"{name}.sum",), wide=False)
        yield Step(block, f"{name}.factor", "series", (f"{name}.about",), wide=False, degree=degree)
        yield Step(block, f"{name}.scaled", "product", (x if cut else power, f"{name}.factor"))
        x = f"{name}.scaled"
        if cut:
            yield Step(block, f"{name}.rest", "shift", (x,))
            x = f"{name}.rest"
    yield Step("token", "token.about", "shift", (x,))


def sign_degrees(degrees: Degrees) -> Degrees:
    """Those of the sign that ends the rounds."""
    return replace(degrees, steep=degrees.cut_steep, flat=degrees.cut_flat)


@dataclass
class Fitted:
    """Polynomials and constants of the rounds, by operation. Logits are written as (logit - zero) / unit, `beyond` in other slots.

    `resolved`: from which difference of the two largest logits on 95% of rows that these were fitted to give a one-hot vector
    within 1%.
    """

    zero: float
    unit: float
    beyond: float
    series: dict[str, Series] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    resolved: float = np.inf


@dataclass
class _Scaling:
    """A round in units in which the largest value is near 1: x -> x f(S) - rest, or x^p f(S), with f = `factor` times `series`."""

    round: Round
    series: Series
    factor: float = 1.0
    rest: float = 0.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        power = _power(x, self.round.squarings)
        by = self.factor * self.series(power.sum(1, keepdims=True))
        return (x if self.round.cut else power) * by - self.rest


def fit_rounds(degrees: Degrees, logits: np.ndarray, margin: float) -> Fitted:
    """Fitted to logits [n, vocabulary] of mean 0 with the second as large as the first.

    margin: over how much wider a range than these the largest logits may vary: its root upwards, its root downwards.
    """
    margin = float(np.sqrt(margin))
    high = float(logits.max()) * margin
    least = float(logits.max(1).min()) / margin
    zero = _below(float(logits.min()), least)
    tied = _tied(logits, 0.0)
    x = (np.concatenate([tied / margin, tied, np.minimum(tied * margin, high)]) - zero) / (high - zero)
    scalings = []
    for found in rounds(degrees):
        scalings.append((_fit_cut if found.cut else _fit_share)(found, x, margin))
        x = scalings[-1](x)
    result = _in_units(scalings, zero, high - zero)
    result.resolved = _resolved(scalings, degrees, logits, zero, high - zero)
    return result


def _below(least: float, largest: float) -> float:
    """What to take from values between these, so that the least is not too far below 0."""
    return (least + _DEEPEST * largest) / (1 + _DEEPEST)


def _fit_cut(found: Round, x: np.ndarray, margin: float) -> _Scaling:
    """The largest value of any row becomes 1, if the second is far below it, and then something is taken from all."""
    scaling = _Scaling(found, fit(lambda s: s ** -(0.5**found.squarings), *_sums(found, x, margin), found.degree))
    scaled = scaling(x)
    largest = float(scaled.max()) * 2 ** (0.5**found.squarings)
    cut = max(0.0, _below(float(scaled.min()) / largest, 1.0))
    scaling.factor, scaling.rest = 1 / largest / (1 - cut), cut / (1 - cut)
    return scaling


def _fit_share(found: Round, x: np.ndarray, margin: float) -> _Scaling:
    """No share exceeds 1, whatever the polynomial's error."""
    low, high = _sums(found, x, margin)
    series, sums = fit_reciprocal(low, high, found.degree), np.geomspace(low, high, _GRID)
    return _Scaling(found, series, 1 / float((sums * series(sums)).max()))


def _sums(found: Round, x: np.ndarray, margin: float) -> tuple[float, float]:
    """Least and largest sum of powers to expect: the largest value may be 1, without a tie a sum is half as large at least.

    Of shares the fewest are left out, and the rest given room: ties of many, for which a wider range would make all others err.
    """
    sums = _power(x, found.squarings).sum(1)
    low = float(sums.min()) / 2 if found.cut else float(np.quantile(sums, _TIES)) / _CROWD
    high = max(float(sums.max()), 1.0) * margin
    return max(low / margin, high * _LEAST), high


def _in_units(scalings: list[_Scaling], zero: float, span: float) -> Fitted:
    """Values before each round are scaled so that the sum's interval has length 2: only a constant moves it to [-1, 1] then."""
    halves = [scaling.series.half for scaling in scalings]
    units = [half ** -(0.5**scaling.round.squarings) for half, scaling in zip(halves, scalings, strict=True)] + [2.0]
    cut = scalings[0].rest / (1 + scalings[0].rest)  # what the first cut takes where the largest value was 1
    result = Fitted(zero, span / units[0], cut * units[0], offsets={"token.about": -1.0})
    for scaling, half, unit, following in zip(scalings, halves, units, units[1:], strict=False):
        name, series = scaling.round.name, scaling.series
        factor = scaling.factor * following * (1 / unit if scaling.round.cut else half)
        result.series[f"{name}.factor"] = Series(series.coefficients * factor, -1.0, 1.0)
        result.offsets[f"{name}.about"] = -series.middle / half
        result.offsets[f"{name}.rest"] = -scaling.rest * following
    return result


def _resolved(scalings: list[_Scaling], degrees: Degrees, logits: np.ndarray, zero: float, span: float) -> float:
    """Measured on logits whose second is moved up to the first; infinite where even 1/16 of the span is not told apart.

    Bisected over gaps: a larger one is taken to be easier.
    """
    logits = logits[:: -(-len(logits) // _TRIED)]

    def told(gap: float) -> bool:
        rows = _tied(logits, gap)
        x = (rows - zero) / span
        for scaling in scalings:
            x = scaling(x)
        x = 2 * x - 1
        for part in sign_series(sign_degrees(degrees)):
            x = chebyshev.chebval(x, part)
        error = np.abs((1 + x) / 2 - (rows == rows.max(1, keepdims=True))).max(1)
        return bool(np.mean(error <= _ERROR) >= _SURE)

    gaps = span * 2.0 ** -np.arange(4, 16, 0.25)
    good, bad = -1, len(gaps)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if told(gaps[middle]) else (good, middle)
    return float(gaps[good]) if good >= 0 else np.inf


def _tied(logits: np.ndarray, gap: float) -> np.ndarray:
    """The second largest of each row moved to `gap` below the largest."""
    if logits.shape[1] < 2:
        return logits
    found, rows = logits.copy(), np.arange(len(logits))
    second, first = np.argpartition(logits, -2, axis=1)[:, -2:].T
    found[rows, second] = logits[rows, first] - gap
    return found


def _power(x: np.ndarray, squarings: int) -> np.ndarray:
    for _ in range(squarings):
        x = x * x
    return x
