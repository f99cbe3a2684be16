"""Ranges from text: what each function meets when the same step is run exactly; then a polynomial for each on its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import UserError
from ..models.decoder import Decoder
from .cutmax import fit_rounds
from .graph import START, Op, Options, Program, Span, build_program
from .meaning import Meaning, Ranges, attending, resolution
from .polynomials import Series, fit, fit_reciprocal, series_depth, sign_series

Range = tuple[float, float]
_WEIGHT = 8.0
"""The largest exponential. A bootstrap errs by about as much whatever it refreshes, so small values would lose the most."""


@dataclass
class Seen:
    """Least and largest value met by each operation that feeds a function; for scores and sums by head."""

    low: dict[str, np.ndarray] = field(default_factory=dict)
    high: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, values: np.ndarray) -> None:
        """values [count, heads], or [count, 1]; none of a text of one token."""
        if not len(values):
            return
        low, high = values.min(0), values.max(0)
        self.low[name] = np.minimum(self.low.get(name, low), low)
        self.high[name] = np.maximum(self.high.get(name, high), high)


def exact_logits(decoder: Decoder, program: Program, tokens: Sequence[int], seen: Seen | None = None) -> np.ndarray:
    """Logits [n, vocabulary], less their mean, of a program's operations with exact functions, in one pass; notes ranges in `seen`.

    The program must skip nothing, so that every row has logits.
    """
    return exact_values(decoder, program, tokens, seen)["logits"][:, 0]


def exact_values(decoder: Decoder, program: Program, tokens: Sequence[int], seen: Seen | None = None) -> dict[str, np.ndarray]:
    """Every value up to the logits, as `exact_logits`."""
    meaning, span = Meaning(decoder, program), Span(len(tokens), 0, program.options)
    values = {START: meaning.embedded(np.eye(decoder.config.vocabulary)[np.asarray(tokens)], 0)}
    for op in program.ops:
        values[op.output] = _exact(meaning, op, [values[name] for name in op.inputs], span)
        if seen is not None and op.feeds:
            _note(seen, op, values[op.output])
        if op.output == "logits":
            break
    values["logits"] = values["logits"][..., : decoder.config.vocabulary]
    return values


def _exact(meaning: Meaning, op: Op, inputs: list[np.ndarray], span: Span) -> np.ndarray:
    if op.kind == "linear":
        return meaning.linear(op, inputs[0], span)
    if op.kind == "fold":
        return meaning.fold(inputs)
    if op.kind == "series":
        return meaning.function(op)(inputs[0])
    a, b = meaning.operands(op, inputs)
    return a * b


def _note(seen: Seen, op: Op, values: np.ndarray) -> None:
    kind = op.name.split(".")[-1]
    if kind == "scores":
        seen.add(op.name, values[..., 0].transpose(0, 2, 1)[attending(values)[:, 0, :, 0] > 0])
    elif kind == "total":  # all but the first position's, which are public
        seen.add(op.name, values[1:, :, 0])
    else:
        seen.add(op.name, values.reshape(-1, 1))


def calibrate(decoder: Decoder, program: Program, texts: Sequence[Sequence[int]], margin: float = 1.25) -> Ranges:
    """A polynomial for every function of the program, on what the texts (token ids) make it meet.

    margin: by how much intervals are widened, and variances and sums may leave what was seen on either side.
    Raises UserError for texts that are too short.
    """
    if max((len(tokens) for tokens in texts), default=0) < 2:
        raise UserError("calibration text of one token: attention is never run on it; give passages of two tokens or more")
    full = build_program(decoder.config, program.degrees, Options(skip=False), program.slots)
    seen = Seen()
    logits = np.concatenate([exact_logits(decoder, full, tokens, seen) for tokens in texts])
    meaning, series, shifts, units = Meaning(decoder, program), {}, {}, {}
    for op in program.ops:
        if not op.feeds:
            continue
        layer, kind = op.name.split(".")[0], op.name.split(".")[-1]
        low, high = seen.low[op.name], seen.high[op.name]
        if kind == "scores":
            low, high = _widened(low, high, margin)
            shifts[layer] = high - np.log(_WEIGHT)
            found = float((low - shifts[layer]).min()), float(np.log(_WEIGHT))
        elif kind == "total":
            units[layer] = np.sqrt(low * high) * np.exp(-shifts[layer])
            ratio = margin * float(np.sqrt(high / low).max())
            found = 1 / ratio, ratio
        elif kind == "variance":
            found = float(low[0]) / margin, float(high[0]) * margin
        else:
            found = tuple(float(x[0]) for x in _widened(low, high, margin))  # type: ignore[assignment]
        series[op.feeds] = _fitted(meaning, program, op.feeds, found)
    return with_argmax(Ranges(series, shifts, units), program, logits, margin)


def check_resolved(ranges: Ranges, margin: float) -> None:
    """Raise UserError where the argmax would tell no logits apart."""
    if not np.isfinite(ranges.resolved):
        raise UserError(f"margin {margin}: over so wide a range cutmax tells no logits apart; lower it, or take --argmax league")


def with_argmax(ranges: Ranges, program: Program, logits: np.ndarray, margin: float) -> Ranges:
    """What the argmax needs to know of logits like these [n, vocabulary], of mean 0, added to the ranges."""
    low, high = (float(x) for x in _widened(logits.min(), logits.max(), margin))
    if program.argmax == "cutmax":
        fitted = fit_rounds(program.degrees, logits, margin)
        found = {name: getattr(fitted, name) for name in ("zero", "unit", "beyond", "offsets", "resolved")}
        return replace(ranges, logits=(low, high), series=ranges.series | fitted.series, **found)
    steps = 1 if program.groups == [program.candidates] else 2  # the largest is told from the others, then met by all again
    resolved = steps * resolution(sign_series(program.sign_degrees)) * (high - low)
    return replace(ranges, logits=(low, high), zero=(low + high) / 2, unit=high - low, resolved=resolved)


def _fitted(meaning: Meaning, program: Program, name: str, span: Range) -> Series:
    op = next(op for op in program.ops if op.name == name)
    degree = getattr(program.degrees, name.split(".")[-1])
    assert op.depth == series_depth(degree)
    return fit_reciprocal(*span, degree) if name.endswith("reciprocal") else fit(meaning.function(op), *span, degree)


def _widened(low: np.ndarray, high: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """The interval, `margin` times as wide about its middle; a single value becomes a narrow interval."""
    middle, half = (low + high) / 2, margin * np.maximum(high - low, 1e-6 + 1e-6 * np.abs(high)) / 2
    return middle - half, middle + half
