"""One operation on the plugin's primitives and as stock SPU has it: traffic, seconds and error against float64 over its range.

Every result is one that a user can go on with: 16 or 18 fraction bits in the whole ring, but for norm and softmax, whose
results (28 or 32 bits) the next dot truncates as it opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from ..dealer.plan import Shape, table_of
from ..primitives.argmax import argmax
from ..primitives.attention import SoftmaxPlan, softmax
from ..primitives.compare import less, maximum, relu
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, decode, encode
from ..primitives.lookup import lookup
from ..primitives.named import NAMED, NamedFunction
from ..primitives.narrow.activation import activation, activation_plan
from ..primitives.narrow.exponential import exponential, exponential_plan
from ..primitives.narrow.inverse_root import inverse_root, inverse_root_plan
from ..primitives.narrow.pieces import last_weights
from ..primitives.narrow.reciprocal import reciprocal, reciprocal_plan
from ..primitives.narrow.softmax import softmax as narrow_softmax
from ..primitives.narrow.softmax import softmax_plan
from ..primitives.norm import NormPlan, norm_dot, root_table
from ..primitives.permute import shuffle
from ..primitives.select import select
from ..primitives.topk import top_k_mask
from ..primitives.truncate import truncate
from ..runtime import ProtocolConfig, Session, Slot
from ..runtime.assisted import TRUST, Assisted, OperandSlot
from ..runtime.session import Phase

Arrays = tuple[np.ndarray, ...]

_BITS = 18  # fraction bits, as stock SPU's
_TABLE_BITS = 20  # of what is looked up: a table's place takes up to 19
_OUT_BITS = 16
_COMPARED_BITS = 24  # of differences of numbers in [-16, 16]
_ROW = 64
_FACTOR = round(2**0.5 * 2.0**_BITS)
_KEPT = 8
_SOFTMAX = SoftmaxPlan(  # 64 errors of exp add up
    table_of(Shape(32, -1, 5, continued=True), np.exp, jnp.exp, (-8.0, 0.0), 18, 16),
    table_of(Shape(64, 0, 6, continued=True), np.reciprocal, jnp.reciprocal, (1.0, 64.0), 14, 16),
    bits=16,
)
_NORM = NormPlan(root_table(_ROW, 0.25, 15.0, segments=256))
_STREAM_BITS = 28  # of a norm's input, as in the models


@dataclass(frozen=True)
class Op:
    """What is measured, over inputs that both fixed-point formats hold exactly.

    inputs: for a number of elements, those of the first input; an integer input stands for itself. bits: fraction bits of each
    on the plugin. operands: which are the owner's static matrices. stock: the cheapest way found to write it for SPU.
    ordered: whether results are compared in their places, or sorted. generic: as stock, with the function narrowed to its range.
    """

    inputs: Callable[[int], Arrays]
    ours: Callable[..., Fixed]
    stock: Callable[..., Any]
    exact: Callable[..., np.ndarray]
    bits: tuple[int, ...] = (_BITS, _BITS)
    operands: frozenset[int] = frozenset()
    ordered: bool = True
    generic: Callable[..., Any] | None = None


def bench_op(name: str, elements: int, repeats: int) -> dict[str, Any]:
    """Figures of one pass, bytes for each element of the first input (rows are filled up to 64)."""
    op = OPS[name]
    inputs = op.inputs(elements)
    want = np.asarray(op.exact(*inputs), np.float64)
    y, phase, seconds, dealt = _ours(op, inputs, repeats)
    figures = partial(_figures, op, inputs[0].size, want)
    found = figures(y, phase, seconds) | {"dealer_bytes_per_element": dealt / inputs[0].size, "trust": TRUST}
    found["stock"] = figures(*_on_spu(op, op.stock, inputs, repeats))
    if op.generic is not None:
        found["generic"] = figures(*_on_spu(op, op.generic, inputs, repeats))
    return found


_FIGURES = f"{'B/elem':>8} {'messages':>8} {'error':>8} {'seconds':>8}"
HEADER = f"{'':12} {_FIGURES} {'dealer B':>8}  stock:{_FIGURES}  generic:{_FIGURES}"
"""Above `row`s. Generic is stock SPU with the function narrowed to its range."""


def row(name: str, figures: dict[str, Any]) -> str:
    """One line for people."""

    def part(side: dict[str, Any]) -> str:
        return f"{side['bytes_per_element']:8.1f} {side['messages']:8} {side['max_error']:8.1e} {side['seconds']:8.4f}"

    line = f"{name:12} {part(figures)} {figures['dealer_bytes_per_element']:8.1f}        {part(figures['stock'])}"
    return f"{line}          {part(figures['generic'])}" if "generic" in figures else line


def _figures(op: Op, elements: int, want: np.ndarray, found: np.ndarray, phase: Phase, seconds: float) -> dict[str, Any]:
    pair = (found, want) if op.ordered else (np.sort(found, None), np.sort(want, None))
    return {
        "bytes_per_element": phase.bytes / elements,
        "messages": phase.messages,
        "max_error": float(np.abs(pair[0] - pair[1]).max()),
        "seconds": seconds,
    }


def _ours(op: Op, inputs: Arrays, repeats: int) -> tuple[np.ndarray, Phase, float, int]:
    """(result, last pass, median seconds, dealer bytes of a pass to the party that gets more)."""
    with Session(ProtocolConfig()) as session:
        assisted = Assisted(session)
        names: list[Any] = []
        slots: list[Any] = []
        for i, (value, bits) in enumerate(zip(inputs, op.bits, strict=False)):
            fixed = Fixed(value, 0) if value.dtype == np.int64 else Fixed(encode(value, bits), bits)
            if i in op.operands:
                names.append(assisted.mask_operand(f"in{i}", fixed.raw, "owner", transposed=True))
                slots.append(fixed.with_raw(OperandSlot(f"in{i}", fixed.shape, transposed=True)))
            else:
                session.share(f"in{i}", fixed.raw, "client")
                names.append(f"in{i}")
                slots.append(fixed.with_raw(Slot(fixed.shape, np.int64)))
        program = assisted.compile("op", op.ours, tuple(slots), (None,))
        phase, seconds = _passes(session, lambda: assisted.run(program, tuple(names), ["out"]), repeats)
        assisted.check_ranges()
        result: Fixed = program.tree.unflatten([session.receive("out")])
    return decode(result.raw, result.bits), phase, seconds, program.dealer_bytes


def _on_spu(op: Op, function: Callable[..., Any], inputs: Arrays, repeats: int) -> tuple[np.ndarray, Phase, float]:
    """(result, last pass, median seconds) of a function on stock SPU."""
    with Session(ProtocolConfig()) as session:
        names = [f"in{i}" for i in range(len(inputs))]
        slots = [Slot(value.shape, value.dtype) for value in inputs]
        for i, value in enumerate(inputs):
            session.share(names[i], value, "owner" if i in op.operands else "client")
            if i in op.operands:
                session.keep_opened(names[i], slots[i])
        program = session.compile("op", function, tuple(slots))
        phase, seconds = _passes(session, lambda: session.run(program, tuple(names), "out"), repeats)
        return np.asarray(session.receive("out"), np.float64), phase, seconds


def _passes(session: Session, run: Callable[[], None], repeats: int) -> tuple[Phase, float]:
    """The last of so many passes, and their median time; one before them warms up."""
    seconds = []
    for i in range(repeats + 1):
        with session.phase(f"pass {i}") as phase:
            run()
        seconds.append(phase.seconds)
    return phase, median(seconds[1:])


# Inputs


def _spread(low: float, high: float, count: int, width: float = 0.0) -> np.ndarray:
    """Numbers over a range with both ends, a quarter of them in its last `width`."""
    last = count // 4 if width else 0
    x = np.concatenate([np.linspace(low, high, count - last), np.linspace(max(low, high - width), high, last)])
    return np.clip(_held(x), low, high)


def _held(x: np.ndarray) -> np.ndarray:
    """Rounded to what SPU holds."""
    return np.round(x * 2.0**_BITS) / 2.0**_BITS


def _random(low: float, high: float, *shape: int) -> np.ndarray:
    return _held(np.random.default_rng(0).uniform(low, high, shape))


def _pair(count: int) -> Arrays:
    """Numbers in [-16, 16] and as many in another order; every other pair is equal but for one unit."""
    x = _random(-16, 16, count)
    y = np.random.default_rng(1).permutation(x)
    y[::2] = x[::2] - 2.0**-_BITS
    return x, y


def _rows(low: float, high: float, count: int) -> np.ndarray:
    """Rows of 64 numbers, no two of a row alike."""
    rows = -(-count // _ROW)
    steps = np.random.default_rng(0).permuted(np.tile(np.arange(_ROW), (rows, 1)), axis=1)
    return _held(low + (high - low) * (steps + 0.5) / _ROW)


def _scores(count: int) -> Arrays:
    """Rows of 64 in [-8, 0], position 0 at the top; the first is 0 throughout and the second as low as can be."""
    scores = _random(-8, 0, max(2, -(-count // _ROW)), _ROW)
    scores[0], scores[1], scores[:, 0] = 0, -8, 0
    return (scores,)


def _matrix(count: int) -> Arrays:
    """A row in [-4, 4] and a matrix for it."""
    return _random(-4, 4, 1, count), _held(_random(-1, 1, count, _ROW) / _ROW)


def _activations(count: int) -> Arrays:
    """Rows of 64 with mean squares from 0.5 to 8, a matrix for them, and phi."""
    x = np.random.default_rng(0).standard_normal((max(2, -(-count // _ROW)), _ROW))
    sizes = np.linspace(0.51, 7.99, len(x)) ** 0.5
    return _held(x * (sizes / np.mean(x**2, -1) ** 0.5)[:, None]), _random(-0.25, 0.25, _ROW, _ROW), np.ones(())


def _indices(count: int) -> Arrays:
    """Places in a table of 64 rows of 16, and the table."""
    return np.random.default_rng(0).integers(0, _ROW, count), _random(-8, 8, _ROW, 16)


def _shuffled(count: int) -> Arrays:
    """64 rows, and keys whose order is stock SPU's permutation."""
    return _random(-8, 8, _ROW, -(-count // _ROW)), np.random.default_rng(1).integers(0, 2**61, _ROW)


# Operations


def _looked_up(named: NamedFunction, generic: Callable[..., Any] | None) -> Op:
    def ours(x: Fixed) -> Fixed:
        return truncate(lookup(x, named.table), _OUT_BITS)

    inputs = partial(_spread, named.low, named.high, width=named.table.width)
    return Op(lambda count: (inputs(count),), ours, named.stock, named.numpy, (_TABLE_BITS,), generic=generic)


def _generic(name: str, named: NamedFunction) -> Callable[..., Any] | None:
    """The function narrowed to its range; None for those that no decoder takes."""
    low, high = named.span
    if name in ("gelu", "gelu_tanh", "silu"):
        return partial(activation, plan=activation_plan(name, high))
    if name == "exp":
        return partial(exponential, plan=exponential_plan(low, high))
    if name == "reciprocal":
        return partial(reciprocal, plan=reciprocal_plan(low, high))
    if name != "rsqrt":
        return None
    plan = inverse_root_plan(high / low)
    unit = plan.low / low
    return lambda x: inverse_root(x * unit, plan, np.array(last_weights(plan)) * unit**0.5)


def _generic_softmax(scores: Any) -> Any:
    return narrow_softmax(scores, np.ones(_ROW, bool), scores[:, :1], softmax_plan((-8.0, 0.0), (0.0, log(_ROW)), _ROW))


def _norm(x: Any, kernel: Any, phi: Any) -> Any:
    return x @ kernel / np.sqrt(np.mean(x**2, -1, keepdims=True))


def _stock_norm(x: Any, kernel: Any, phi: Any) -> Any:
    return x @ kernel * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))


def _stock_shuffle(x: Any, keys: Any) -> Any:
    return jnp.stack(jax.lax.sort((keys, *x.T), num_keys=1)[1:], 1)


def _largest(x: Any, k: int = 1) -> Any:
    """1 at the k largest of each row."""
    return (x >= np.sort(x, -1)[:, -k][:, None]).astype(np.float64)


OPS: dict[str, Op] = {name: _looked_up(named, _generic(name, named)) for name, named in NAMED.items()} | {
    "softmax": Op(
        _scores,
        lambda x: softmax(x, np.ones(_ROW, np.int64), _SOFTMAX),
        jax.nn.softmax,
        partial(special.softmax, axis=-1),
        generic=_generic_softmax,
    ),
    "dot": Op(_matrix, lambda x, w: truncate(contract("nk,km->nm", x, w), _BITS), jnp.matmul, np.matmul, operands=frozenset({1})),
    "product": Op(_pair, lambda x, y: truncate(contract("n,n->n", x, y), _BITS), jnp.multiply, np.multiply),
    "truncate": Op(
        lambda count: (_spread(-16, 16, count),),
        lambda x: truncate(Fixed(x.raw * _FACTOR, 2 * _BITS), _BITS),
        lambda x: x * (_FACTOR / 2.0**_BITS),
        lambda x: x * (_FACTOR / 2.0**_BITS),
    ),
    "relu": Op(lambda count: (_spread(-16, 16, count),), lambda x: relu(x, _COMPARED_BITS), jax.nn.relu, partial(np.maximum, 0)),
    "compare": Op(_pair, lambda x, y: less(x, y, _COMPARED_BITS), lambda x, y: (x < y) * 1, np.less),
    "maximum": Op(_pair, lambda x, y: maximum(x, y, _COMPARED_BITS), jnp.maximum, np.maximum),
    "argmax": Op(
        lambda count: (_rows(-16, 16, count),),
        lambda x: argmax(x, bits=_COMPARED_BITS),
        lambda x: (x == jnp.max(x, -1, keepdims=True)) * 1,
        _largest,
    ),
    "topk": Op(
        lambda count: (_rows(-16, 16, count),),
        lambda x: top_k_mask(x, _KEPT, _COMPARED_BITS),
        lambda x: (x >= jax.lax.top_k(x, _KEPT)[0][:, -1:]) * 1,
        partial(_largest, k=_KEPT),
    ),
    "permute": Op(_shuffled, lambda x, keys: shuffle(x)[0], _stock_shuffle, lambda x, keys: x, ordered=False),
    "select": Op(
        _indices,
        lambda index, table: select(table, index),
        lambda index, table: (index[:, None] == jnp.arange(_ROW)) @ table,
        lambda index, table: table[index],
        operands=frozenset({1}),
    ),
    "rms_norm_dot": Op(
        _activations,
        lambda x, kernel, phi: norm_dot(x, kernel, _NORM, phi),
        _stock_norm,
        _norm,
        (_STREAM_BITS, 19, _NORM.weight_bits(_STREAM_BITS)),
        frozenset({1, 2}),
    ),
}
"""By the names that `spu-llm bench op` takes."""
