"""Fits the coefficients of this folder's functions: `python -m spu_llm.primitives.narrow.fit` writes `coefficients.json`.

A chain of squarings (`chain.py`) is fitted in two parts: scale, shift and constants by non-linear least squares from drawn starts
(seed 0), the weights by linear least squares inside it. Lawson's re-weighting turns least squares into the least largest error;
a linear program settles the weights at last. A fit is judged by its error and by how far it carries the truncations' errors.
Everything is rounded to 2^-18 on the way, so that the error that is written down is that of the coefficients that are written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy import special
from scipy.optimize import least_squares, linprog

from .chain import Chain

Array = np.ndarray

FILE = Path(__file__).with_name("coefficients.json")
UNIT = 2.0**-18
_STARTS, _REFINED, _ROUNDED = 1500, 30, 3
_LAWSON = 10
_POINTS, _CHECKED = 160, 20001
_SMALL_WEIGHT = 2.0**-6
_LARGEST = 60.0  # of a weight or of a y: what is larger loses bits


@dataclass(frozen=True)
class Target:
    """What is fitted: `function` on [low, high] with errors divided by `size`, by so many squarings.

    kind: "power", exponential-like, without weights; "even", a line plus an even function, so that shift is 0; "free", neither;
    "power law", free and f(a x) = a^degree f(x), so that x can be measured in the unit that makes the scale 1.
    """

    function: Callable[[Array], Array]
    size: Callable[[Array], Array]
    low: float
    high: float
    levels: int
    kind: str
    degree: float = 0.0


def _one(x: Array) -> Array:
    return np.ones_like(x)


def _softmax_size(x: Array) -> Array:
    """In softmax errors count relative to the weight; but many small weights add up, so that theirs must be small too."""
    return np.maximum(_SMALL_WEIGHT, np.exp(x))


def _gelu_tanh_gate(x: Array) -> Array:
    return special.expit(2 * (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))


def exact(name: str) -> Callable[[Array], Array]:
    """The function that chains of this name stand for, in float64."""
    functions: dict[str, Callable[[Array], Array]] = {
        "exponential": np.exp,
        "silu": lambda x: x * special.expit(x),
        "gelu": lambda x: x * special.ndtr(x),
        "gelu_tanh": lambda x: x * _gelu_tanh_gate(x),
        "silu_tail": lambda x: x * special.expit(-x),
        "gelu_tail": lambda x: x * special.ndtr(-x),
        "gelu_tanh_tail": lambda x: x * _gelu_tanh_gate(-x),
        "inverse_root": lambda x: x**-0.5,
        "reciprocal": lambda x: 1 / x,
    }
    return functions[name]


_EXPONENTIALS = ((-16.0, 2.0, 5), (-32.0, 4.0, 6), (-64.0, 8.0, 6), (-128.0, 8.0, 7))
_EVEN = {
    "silu": ((8.0, 5), (12.0, 6), (16.0, 7)),
    "gelu": ((6.0, 5), (8.0, 6), (12.0, 7)),
    "gelu_tanh": ((6.0, 5), (8.0, 6), (12.0, 7)),
}
_TAILS = {
    "silu_tail": ((32.0, 5), (48.0, 5), (64.0, 6)),
    "gelu_tail": ((16.0, 5), (32.0, 6)),
    "gelu_tanh_tail": ((16.0, 5), (32.0, 6)),
}
_POWERS = (("inverse_root", -0.5, 27.5, 5), ("inverse_root", -0.5, 4.2, 3), ("reciprocal", -1.0, 4.2, 3))


def targets() -> Iterator[tuple[str, Target]]:
    """Every chain of the table, by name."""
    for low, high, levels in _EXPONENTIALS:
        yield "exponential", Target(np.exp, _softmax_size, low, high, levels, "power")
    for kind, sizes in (("even", _EVEN), ("free", _TAILS)):
        for name, cases in sizes.items():
            for high, levels in cases:
                yield name, Target(exact(name), _one, -high if kind == "even" else 0.0, high, levels, kind)
    for name, degree, ratio, levels in _POWERS:
        yield name, Target(exact(name), exact(name), 1 / ratio, 1.0, levels, "power law", degree)


def grid(low: float, high: float, count: int) -> Array:
    """Chebyshev's points with both ends: dense where polynomials go wrong."""
    return (low + high) / 2 + (high - low) / 2 * np.cos(np.linspace(np.pi, 0, count))


def fit(target: Target) -> Chain:
    """The best chain found. Deterministic."""
    problem = _Problem(target)
    starts = sorted(problem.starts(np.random.default_rng(0)), key=problem.start_error)[:_REFINED]
    found = sorted((problem.refined(start) for start in starts), key=lambda pair: pair[0])
    return min((problem.rounded(theta) for _, theta in found[:_ROUNDED]), key=lambda chain: chain.error)


class _Problem:
    """One target on its grid. A vector theta is (scale, shift unless even, constants)."""

    def __init__(self, target: Target):
        self.target = target
        self.x = grid(target.low, target.high, _POINTS)
        self.want = target.function(self.x)
        self.weight = 1 / target.size(self.x)

    def starts(self, random: np.random.Generator) -> Iterator[Array]:
        """Chains whose values stay near [-1, 1] over the range; of exponentials, powers of a quadratic start."""
        t = self.target
        middle, half = (t.low + t.high) / 2, (t.high - t.low) / 2
        for _ in range(_STARTS):
            constants = -random.uniform(-0.2, 1.6, t.levels)
            if t.kind == "power":  # (1 + z + z^2 / 2)^(2^(k-1)) for z = x / 2^(k-1), and some of it changed
                z = 2.0 ** (t.levels - 1)
                start = np.array([0.5**0.5 / z, 0.5**0.5, 0.5, *np.zeros(t.levels - 1)])
                yield start * random.uniform(0.7, 1.3, len(start)) + np.append(0, random.normal(0, 0.05, len(start) - 1))
            elif t.kind == "even":
                yield np.append(random.uniform(0.7, 1.6) / half, constants)
            else:
                scale = random.uniform(0.5, 1.7) / half
                yield np.concatenate([[scale, -scale * middle + random.uniform(-0.5, 0.5)], constants])

    def start_error(self, theta: Array) -> float:
        values = self.values(theta, self.x)
        return float(np.abs(self.residual(self.solve(values, _one(self.x)), values)).max())

    def values(self, theta: Array, x: Array) -> Array:
        """y_0 to y_k, [points, k + 1]; what runs away is cut, so that it counts as bad."""
        even = self.target.kind == "even"
        y = theta[0] * x + (0 if even else theta[1])
        values = [y]
        for constant in theta[1 if even else 2 :]:
            y = np.clip(y * y + constant, -1e6, 1e6)
            values.append(y)
        return np.stack(values, axis=1)

    def solve(self, values: Array, lawson: Array) -> Array:
        """The weights of y_0 to y_k and of 1."""
        if self.target.kind == "power":
            return np.append(np.zeros(values.shape[1] - 1), [1.0, 0.0])
        factor = (self.weight * lawson)[:, None]
        return np.linalg.lstsq(_with_one(values) * factor, self.want * factor[:, 0], rcond=1e-10)[0]

    def residual(self, weights: Array, values: Array) -> Array:
        return (_with_one(values) @ weights - self.want) * self.weight

    def noise(self, weights: Array, values: Array) -> float:
        """The largest error from truncations: a unit in each y, carried through the squarings after it, and one in the result."""
        slope, total = np.zeros(len(values)), np.zeros(len(values))
        for i in reversed(range(values.shape[1])):
            slope = weights[i] + slope * 2 * (values[:, i] if i + 1 < values.shape[1] else 0)
            total += np.abs(slope)
        return float(((total + 1) * self.weight).max()) * UNIT

    def refined(self, theta: Array, fixed: int = 0) -> tuple[float, Array]:
        """(error and noise, theta) of the best found from here, the first `fixed` numbers held."""
        held, lawson, best = theta[:fixed], np.ones_like(self.x), (np.inf, theta)

        def objective(free: Array) -> Array:
            values = self.values(np.concatenate([held, free]), self.x)
            weights = self.solve(values, lawson)
            large = max(0.0, np.abs(values).max() - 4, np.abs(weights).max() - _LARGEST)
            penalty = [0.01 * self.noise(weights, values), 0.0 if self.target.kind == "power" else 0.01 * large]
            return np.concatenate([self.residual(weights, values) * lawson, penalty])

        for _ in range(_LAWSON):
            free = least_squares(objective, theta[fixed:], max_nfev=40).x
            theta = np.concatenate([held, free])
            values = self.values(theta, self.x)
            weights = self.solve(values, lawson)
            errors = np.abs(self.residual(weights, values))
            judged = float(errors.max()) + self.noise(weights, values)
            if np.abs(weights).max() < _LARGEST and judged < best[0]:
                best = judged, theta
            lawson = np.sqrt(lawson**2 * (errors / errors.max() + 0.02))
            lawson /= np.sqrt(np.mean(lawson**2))
        return best

    def rounded(self, theta: Array) -> Chain:
        """Scale first, with the rest fitted again; then the rest; then the weights by a linear program."""
        t = self.target
        if theta[0] < 0:  # the same squares
            theta = np.concatenate([-theta[: 1 if t.kind == "even" else 2], theta[1 if t.kind == "even" else 2 :]])
        if t.kind == "power law":
            unit, theta = theta[0], np.append(1.0, theta[1:])
            moved = _Problem(replace(t, low=t.low * unit, high=t.high * unit))
            return moved._settled(_rounded(theta))
        theta = np.append(_rounded(theta[:1]), theta[1:])
        return self._settled(_rounded(self.refined(theta, fixed=1)[1]))

    def _settled(self, theta: Array) -> Chain:
        t = self.target
        x = grid(t.low, t.high, 1000)
        values, weight, want = _with_one(self.values(theta, x)), 1 / t.size(x), t.function(x)
        weights = None if t.kind == "power" else _rounded(_least_largest(values * weight[:, None], want * weight))
        even = t.kind == "even"
        chain = Chain(t.low, t.high, float(theta[0]), 0.0 if even else float(theta[1]), tuple(theta[1 if even else 2 :].tolist()))
        if weights is not None:
            chain = replace(chain, weights=tuple(weights[:-1].tolist()), offset=float(weights[-1]))
        return replace(chain, error=error(chain, t))


def error(chain: Chain, target: Target) -> float:
    """The largest error over a dense grid, in units of the target's size, in float64."""
    x = np.linspace(chain.low, chain.high, _CHECKED)
    y = x * chain.scale + chain.shift
    values = [y]
    for constant in chain.constants:
        y = y * y + constant
        values.append(y)
    found = np.stack(values, -1) @ np.array(chain.weights) + chain.offset if chain.weights else y
    return float(np.max(np.abs(found - target.function(x)) / target.size(x)))


def _with_one(values: Array) -> Array:
    return np.concatenate([values, np.ones((len(values), 1))], axis=1)


def _rounded(x: Array) -> Array:
    return np.round(np.asarray(x) / UNIT) * UNIT


def _least_largest(columns: Array, want: Array) -> Array:
    """The weights whose largest error is least."""
    count = columns.shape[1]
    bound = np.ones((len(columns), 1))
    found = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=np.block([[columns, -bound], [-columns, -bound]]),
        b_ub=np.concatenate([want, -want]),
        bounds=[(-_LARGEST, _LARGEST)] * count + [(0, None)],
        method="highs",
    )
    return np.asarray(found.x[:-1])


def main() -> None:
    """Fit everything and write the table."""
    table: dict[str, list[dict]] = {}
    for name, target in targets():
        chain = fit(target)
        table.setdefault(name, []).append(asdict(chain))
        print(f"{name:16} [{chain.low:g}, {chain.high:g}] {chain.levels} squarings: {chain.error:.1e}", flush=True)
    FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
