"""What each operation of a step computes on plain arrays: public maps of the model's weights, functions that series stand for.

Arrays: [rows, pieces, size], or [rows, pieces, positions, size] for values of pairs; a stored value is [positions, heads, size].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.special import expit

from ..models.decoder import Decoder
from .graph import Op, Program, Span
from .polynomials import Series, sign_series

Function = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Ranges:
    """What calibration found: a series for each function, by the operation's name, and by layer what heads are shifted and scaled
    by: scores less `shifts`, sums over `units` ([heads] each). `logits`: least and largest logit, less their mean. The argmax
    takes (logit - `zero`) / `unit`, and `beyond` in slots beyond the vocabulary; a shift adds its `offsets`. Logits that differ by
    `resolved` are told apart."""

    series: dict[str, Series] = field(default_factory=dict)
    shifts: dict[str, np.ndarray] = field(default_factory=dict)
    units: dict[str, np.ndarray] = field(default_factory=dict)
    logits: tuple[float, float] = (-0.5, 0.5)
    zero: float = 0.0
    unit: float = 1.0
    beyond: float = -0.5
    offsets: dict[str, float] = field(default_factory=dict)
    resolved: float = np.inf


class Meaning:
    """The operations of a program for a model's weights. Without ranges: scores and sums as they are, logits unscaled."""

    def __init__(self, decoder: Decoder, program: Program, ranges: Ranges | None = None):
        self.decoder, self.program, self.config = decoder, program, decoder.config
        self.ranges = ranges or Ranges()
        self._layers = [self._folded(layer) for layer in decoder.params["layers"]]
        table = np.asarray(decoder.params["embed"]["table"], np.float32)
        self._table = self._centred(table)
        head = np.asarray(decoder.head_table, np.float32)
        self._head = head - head.mean(0)
        positions = decoder.params["embed"].get("positions")
        self._positions = None if positions is None else self._centred(np.asarray(positions, np.float32))
        self._signs = sign_series(program.sign_degrees)
        self.threshold = resolution(self._signs)

    def embedded(self, weights: np.ndarray, place: int) -> np.ndarray:
        """weights [rows, vocabulary], 1 at each row's token, -> [rows, 1, width]; row i stands at position place + i."""
        x = _times(weights, self._table)
        if self._positions is not None:
            x = x + self._positions[place : place + len(x)]
        return x[:, None]

    def linear(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        """A linear operation; its result is as the series it feeds takes it."""
        found = getattr(self, f"_{op.name.split('.')[-1]}")(op, x, span)
        if op.feeds in self.ranges.series:
            series = self.ranges.series[op.feeds]
            found = (found - series.middle) / series.half
        return found

    def fold(self, inputs: list[np.ndarray]) -> np.ndarray:
        """A layer's sums: of values that were weighed, over positions; of rows, where only the last ones are needed of both."""
        if len(inputs) == 1:
            return inputs[0].sum(2)
        rows = min(len(x) for x in inputs)
        return inputs[0][-rows:] + inputs[1][-rows:]

    def operands(self, op: Op, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """A layer's product's inputs, laid out alike."""
        kind = op.name.split(".")[-1]
        if kind in ("dot", "weighed"):
            first = inputs[0][:, :, None] if kind == "dot" else inputs[0]
            return list(np.broadcast_arrays(first, inputs[1].transpose(1, 0, 2)[None]))
        rows = min(len(x) for x in inputs)
        return [x[-rows:] for x in inputs]

    def logits(self, written: np.ndarray) -> np.ndarray:
        """Logits less their mean, of what the argmax takes."""
        return written * self.ranges.unit + self.ranges.zero

    def offset(self, op: Op) -> float:
        """What a shift adds."""
        return self.ranges.offsets[op.name]

    def coefficients(self, op: Op) -> np.ndarray:
        """Of a series, for inputs in [-1, 1]."""
        *_, part = op.name.split(".")
        if not part.startswith("sign"):
            return self.ranges.series[op.name].coefficients
        number = int(part.removeprefix("sign"))
        found = self._signs[number]
        if number == len(self._signs) - 1:  # (1 + sign) / 2 tells who wins; a duel adds half the lead to the middle
            found = found / 2
            if not self._duels(op):
                found = found + np.eye(1, len(found))[0] / 2
        return found

    def function(self, op: Op) -> Function:
        """What a series stands for."""
        *_, part = op.name.split(".")
        if part == "inverse_root":
            return lambda x: 1 / np.sqrt(x)
        if part == "exponential":
            return lambda x: np.exp(x / 2**self.program.degrees.squarings)
        if part == "reciprocal":
            return lambda x: 1 / x
        return _silu if self.config.llama_like else _gelu

    def _duels(self, op: Op) -> bool:
        name = op.name.split(".")[0]
        return name.startswith("round") and self.program.groups[int(name.removeprefix("round"))] == 2

    def _centred(self, kernel: np.ndarray) -> np.ndarray:
        """What writes the residual stream, less its mean over the width: the mean that layer norms take away."""
        return kernel if self.config.llama_like else kernel - kernel.mean(-1, keepdims=True)

    def _folded(self, layer: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Kernels [in, out] and biases [out] with norms folded in: q, k, v, out, up, down, and beside where gated."""
        c = self.config
        cuts = [c.width, c.width + c.kv_heads * c.head_width]
        q, k, v = _split(_after(layer["attention_norm"], layer["qkv"]), cuts)
        scale = np.float32(c.head_width**-0.5)
        found = {"q": (q[0] * scale, q[1] * scale), "k": k, "v": v}
        wide = _after(layer["ffn_norm"], layer["gate_up" if c.llama_like else "up"])
        found |= dict(zip(("up", "beside"), _split(wide, [c.ffn]) if c.llama_like else [wide], strict=False))
        for name, part in (("projected", "out"), ("down", "down")):
            kernel, bias = _affine(layer[part])
            found[name] = (self._centred(kernel), self._centred(bias))
        return found

    def _dense(self, op: Op, x: np.ndarray) -> np.ndarray:
        """x [rows, pieces, size] through the layer's kernel of the operation's name, into the output's pieces."""
        layout = self.program.layouts[op.output]
        layer, name = op.name.split(".")
        kernel, bias = self._layers[int(layer.removeprefix("layer"))][name]
        if layout.last and self.program.options.skip:
            x = x[-1:]
        return (_times(x.reshape(len(x), -1), kernel) + bias).reshape(len(x), -1, layout.size)

    def _q(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        found = self._dense(op, x)
        return found if self.config.rope_base is None else self._rotated(found, span)

    def _k(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return self._repeated(self._q(op, x, span))

    def _v(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return self._repeated(self._dense(op, x))

    def _repeated(self, x: np.ndarray) -> np.ndarray:
        """Keys or values, once for each head that shares them."""
        return np.repeat(x, self.config.heads // self.config.kv_heads, axis=1)

    def _up(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return self._dense(op, x)

    _beside = _down = _up

    def _projected(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return self._dense(op, x / self._unit(op))

    def _variance(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return np.broadcast_to(x.mean(-1, keepdims=True), x.shape) + self.config.epsilon

    def _scores(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        shifts = self.ranges.shifts.get(op.name.split(".")[0], np.zeros(self.config.heads))
        return (x.sum(-1, keepdims=True) - shifts[:, None, None]) * attending(x)

    def _total(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return np.repeat(self._weights(op, x).sum(2) / self._unit(op), self.config.head_width, axis=2)

    def _spread(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return np.repeat(self._weights(op, x), self.config.head_width, axis=3)

    def _weights(self, op: Op, x: np.ndarray) -> np.ndarray:
        """Masked; the first position's weight of itself, the only one it has, is public and as large as the others' sums."""
        alone = np.zeros_like(x)
        if x.shape[0] == x.shape[2]:
            alone[0, :, 0] = self._unit(op)
        return x * attending(x) + alone

    def _unit(self, op: Op) -> np.ndarray:
        """[heads, 1]."""
        return self.ranges.units.get(op.name.split(".")[0], np.ones(self.config.heads))[:, None]

    def _logits(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        """Less their mean, as the argmax takes them."""
        rows = x[-1:] if self.program.options.skip else x
        kernel, bias = _after(self.decoder.params["final"]["norm"], {"kernel": self._head.T})
        found = np.full((len(rows), 1, self.program.candidates), self.ranges.beyond)
        found[..., : self.config.vocabulary] = (_times(rows, kernel) + bias - self.ranges.zero) / self.ranges.unit
        return found

    def _difference(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        """A league's: each less every other of its group, 1 against itself; [opponent, candidate].

        A group's members are as far apart as there are groups, so that halves of the opponents, and members, meet by rotations.
        """
        left = x.shape[-1]
        group = self.program.layouts[op.output].size // left
        members = x[-1].reshape(group, -1)
        found = members[None] - members[:, None] + np.eye(group)[:, :, None]
        return found.reshape(1, 1, -1)

    def _kept(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return x[-1:]

    def _middle(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        a, b = self._halves(x)
        return (a + b) / 2

    def _best(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        """The largest logit, less half of what a sign tells apart, on every logit's slots."""
        return np.broadcast_to(x[-1:], (1, 1, self.program.candidates)) - self.threshold

    def _next(self, op: Op, x: np.ndarray, span: Span) -> np.ndarray:
        return self.embedded(x[0, :, : self.config.vocabulary], span.past + span.new)

    def _halves(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.split(x[-1:], 2, axis=-1)
        return a, b

    def _rotated(self, x: np.ndarray, span: Span) -> np.ndarray:
        """Rotary positions of x's rows, the last of the pass."""
        end, size = span.past + span.new, self.config.head_width
        assert self.config.rope_base is not None
        angles = np.arange(end - len(x), end)[:, None] / self.config.rope_base ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attending(x: np.ndarray) -> np.ndarray:
    """1 where a row of x [rows, pieces, positions, size], the last rows of a pass, attends to a position, else 0.

    Attention at the first position, to itself alone, needs no scores: 0 there too.
    """
    rows, positions = x.shape[0], x.shape[2]
    found = np.tri(rows, positions, positions - rows)
    if rows == positions:
        found[0] = 0
    return found[:, None, :, None]


def resolution(signs: list[np.ndarray], error: float = 0.01) -> float:
    """The least x > 0 from which on the composite sign is within `error` of 1."""
    x = np.geomspace(1e-6, 1, 20001)
    value = x
    for part in signs:
        value = np.polynomial.chebyshev.chebval(value, part)
    return float(x[np.flatnonzero(np.abs(value - 1) > error)[-1] + 1])


def _affine(dense: dict) -> tuple[np.ndarray, np.ndarray]:
    kernel = np.asarray(dense["kernel"], np.float32)
    return kernel, np.asarray(dense.get("bias", np.zeros(kernel.shape[1])), np.float32)


def _after(norm: dict, dense: dict) -> tuple[np.ndarray, np.ndarray]:
    """A kernel and bias that take what a norm gives before its scale and bias."""
    kernel, bias = _affine(dense)
    if "bias" in norm:
        bias = bias + np.asarray(norm["bias"], np.float32) @ kernel
    return np.asarray(norm["scale"], np.float32)[:, None] * kernel, bias


def _split(dense: tuple[np.ndarray, np.ndarray], cuts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(np.split(dense[0], cuts, axis=1), np.split(dense[1], cuts), strict=True))


def _times(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """In the weights' float32; the result in float64."""
    return (x.astype(np.float32) @ kernel).astype(np.float64)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def _silu(x: np.ndarray) -> np.ndarray:
    return x * expit(x)
