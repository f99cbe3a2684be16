"""Dealer protocols for a whole program: a traced function in, a function with correlated randomness as extra input out.

The function's primitives (see `base.py`) are replaced by their dealer protocols, which are generators: each yields the
values it needs opened. All protocols whose inputs are ready go forward together, and what they need opened goes out in
one message. So the messages of a program are the depth of its openings, whatever order it is written in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Literal
from spu.experimental import reveal

from ..dealer.material import Hidden, Recorder, Specification
from ..errors import UserError
from .base import EAGER, PROTOCOLS

RING = 64
_CALLS = {"pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_vjp_call": "call_jaxpr"}

_MOVES: dict[str, Callable[[dict[str, Any]], Callable[[Any], Any]]] = {
    "reshape": lambda params: lambda x: x.reshape(params["new_sizes"]),
    "transpose": lambda params: lambda x: x.transpose(params["permutation"]),
}


@dataclass(eq=False)
class Request:
    """A uniformly masked value on its way to be opened; `result` is public once it is."""

    masked: Any
    result: Any = None


@dataclass(eq=False)
class Opened:
    """A value x = public + hidden.share modulo 2^modulus. Everyone knows `public`, which is uniform given x.

    whole: the shares of x, where these are what is kept of an operand that never changes.
    """

    public: Any
    hidden: Hidden
    modulus: int = RING
    whole: Any = None

    @property
    def share(self) -> Any:
        return self.public + self.hidden.share if self.whole is None else self.whole


@dataclass(eq=False)
class Lifted:
    """A value x = public + hidden.share + flag * wrap.share exactly, in the whole ring; `flag` is public."""

    public: Any
    hidden: Hidden
    wrap: Hidden
    flag: Any

    @property
    def share(self) -> Any:
        return self.public + self.hidden.share + self.flag * self.wrap.share


@dataclass(eq=False)
class Value:
    """A program value: its share (or public array), and how it was opened if it was. One mask serves all its openings."""

    share: Any
    mask: Hidden | None = None
    request: Request | None = None
    views: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def operand(cls, opened: Opened) -> Value:
        """A value that was opened before this program, under a mask that outlives it."""
        return cls(None, opened.hidden, Request(None, opened.public), {"operand": opened})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple((self.views["operand"].public if self.share is None else self.share).shape)


@dataclass
class Dealing:
    """What a protocol works with: the recorder of its correlated randomness, and the ways to open a value."""

    recorder: Recorder
    violations: list[Any] | None = None  # of lookups' ranges (see range_check.py), where the program collects them
    pending: list[Request] = field(default_factory=list)

    def open(self, value: Value) -> Generator[Request, None, Any]:
        """c = x - mask modulo 2^64: uniform, so it may be public. Opened once, however many protocols ask."""
        self.request(value)
        assert value.request is not None
        if value.request.result is None:
            yield value.request
        return value.request.result

    def request(self, *values: Value) -> None:
        """Have values opened in the same message, by whichever `open` comes first."""
        for value in values:
            if value.request is None:
                value.mask = self.recorder.uniform(value.shape)
                value.request = Request(share_of(value) - value.mask.share)
                self.pending.append(value.request)

    def flush(self) -> None:
        """Open everything that was asked for, in one message of 8 bytes an element."""
        flat = reveal(jnp.concatenate([request.masked.reshape(-1) for request in self.pending]))
        at = 0
        for request in self.pending:
            size = prod(request.masked.shape)
            request.result = flat[at : at + size].reshape(request.masked.shape)
            at += size
        self.pending = []

    def protocol(self, primitive: Any) -> Callable | None:
        """The protocol that runs for a primitive; None for what is local on shares."""
        return PROTOCOLS.get(primitive)

    def local(self, primitive: Any, shares: Sequence[Any], params: dict[str, Any]) -> Any:
        """A step that every party does on its own shares."""
        subfuns, params = primitive.get_bind_params(params)
        return primitive.bind(*subfuns, *shares, **params)

    def opened(self, value: Value, shift: int = 0, modulus: int = RING) -> Generator[Request, None, Opened]:
        """x >> shift, for x known modulo 2^modulus: right modulo 2^(modulus - shift), 0 or 1 unit too large.

        The public part is c >> shift and the hidden one mask >> shift: truncation that costs no opening of its own.
        """
        if shift == 0 and "operand" in value.views:
            return replace(value.views["operand"], modulus=modulus)
        c = yield from self.open(value)
        if shift not in value.views:
            assert value.mask is not None
            hidden = self.recorder.derive(lambda r: raised(r, shift), value.mask) if shift else value.mask
            value.views[shift] = (logical_shift(c, shift), hidden)
        public, hidden = value.views[shift]
        return Opened(public, hidden, modulus - shift)

    def lifted(self, value: Value, shift: int, modulus: int) -> Generator[Request, None, Lifted]:
        """x >> shift exactly in the whole ring (0 or 1 unit too large), for x known modulo 2^modulus and |x| < 2^(modulus - 2).

        With x' = x + 2^(modulus - 2) in [0, 2^(modulus - 1)) and u = -mask: x' = c - u, plus 2^modulus if u has its top
        bit and c has not. (DESIGN, "Truncation".)
        """
        c = yield from self.open(value)
        key = ("lift", shift, modulus)
        if key not in value.views:
            assert value.mask is not None
            keep = modulus - shift
            hidden = self.recorder.derive(lambda r: -_low(logical_shift(-r, shift), keep), value.mask)
            wrap = self.recorder.derive(lambda r: (logical_shift(-r, modulus - 1) & 1) << keep, value.mask)
            c = c + (1 << (modulus - 2))
            public = _low(logical_shift(c, shift), keep) - (1 << (modulus - 2 - shift))
            flag = 1 - (logical_shift(c, modulus - 1) & 1)
            value.views[key] = Lifted(public, hidden, wrap, flag)
        return value.views[key]


def logical_shift(x: Any, bits: int) -> Any:
    """Shift int64 right, filling with zeros: numpy arrays at the dealer, traced public arrays in a program."""
    if bits == 0:
        return x
    filled = (1 << (RING - bits)) - 1
    if isinstance(x, (np.ndarray, np.generic)):
        return np.right_shift(x, bits) & filled
    if bits == RING - 1:  # a shift by 63 is compiled to a sign, which a 128-bit ring takes from its own top bit
        return jnp.right_shift(jnp.bitwise_and(jnp.right_shift(x, bits - 1), 2), 1)
    return jnp.bitwise_and(jnp.right_shift(x, bits), filled)


def _low(x: Any, bits: int) -> Any:
    return x if bits >= RING else x & ((1 << bits) - 1)


def raised(mask: np.ndarray, shift: int) -> np.ndarray:
    """The hidden part of x >> shift: c >> shift falls short by the borrow, so the mask's is rounded up half the time."""
    return logical_shift(mask, shift) + 1


@dataclass(frozen=True)
class Dealt:
    """A function whose protocols run on correlated randomness. Call it with the material vector before its own arguments.

    Arguments and results are flat. `operands` says which arguments are masked operands, by name: such an argument is a pair
    (opened value, shares of the whole), or (opened value, shares of its mask) where a result, the operand grown, keeps its name.
    `keeps` says which results are operands, pairs of the latter kind if they were arguments and of the former if they are new.
    `tree` is the structure of the results.
    With `checked` there is one more result: a share of 0 where every lookup's input was in range (see range_check.py).
    """

    jaxpr: Any
    tree: Any
    operands: dict[int, str]
    keeps: dict[int, str]
    checked: bool
    specification: Specification

    def __call__(self, material: Any, *args: Any) -> list[Any]:
        at = 0

        def take(count: int) -> Any:
            nonlocal at
            at += count
            return material[at - count : at]

        return self.evaluate(Dealing(Recorder(take)), args)

    def evaluate(self, dealing: Dealing, args: Sequence[Any]) -> list[Any]:
        """The results, with values opened and correlated randomness had as `dealing` does it (see runtime/emulation.py)."""
        return _evaluate(self, dealing, args)


def with_material(
    function: Callable, shapes: Sequence[Any], operands: dict[int, str], keeps: dict[int, str], checked: bool = False
) -> Dealt:
    """Trace `function` on flat arguments of `shapes` and find the material its protocols need."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    tree = jax.tree_util.tree_structure(out)
    dealt = Dealt(jaxpr, tree, operands, keeps, checked, Specification(()))
    recorder = Recorder(lambda count: jnp.zeros(count, jnp.int64))

    def record(*args: Any) -> Any:
        return dealt.evaluate(Dealing(recorder), args)

    full = [(shape, shape) if i in operands else shape for i, shape in enumerate(shapes)]
    jax.eval_shape(record, *full)
    return replace(dealt, specification=recorder.specification())


def _evaluate(dealt: Dealt, dealing: Dealing, args: Sequence[Any]) -> list[Any]:
    dealing.violations = [] if dealt.checked else None
    closed, recorder = dealt.jaxpr, dealing.recorder
    values: dict[Any, Value] = {}
    for i, (variable, arg) in enumerate(zip(closed.jaxpr.invars, args, strict=True)):
        if i in dealt.operands:
            name, (public, kept) = dealt.operands[i], arg
            grows = name in dealt.keeps.values()
            hidden = recorder.operand(name, kept if grows else kept - public)
            values[variable] = Value.operand(Opened(public, hidden, whole=None if grows else kept))
        else:
            values[variable] = Value(arg)
    values |= {variable: Value(const) for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    steps, renamed = _inline(closed.jaxpr)
    _Schedule(dealing, values, renamed).run(steps)
    out: list[Any] = []
    for i, variable in enumerate(closed.jaxpr.outvars):
        value = _read(variable, values, renamed)
        assert value is not None  # every step ran
        if i in dealt.keeps:
            opened = value.views["operand"]
            recorder.retain(dealt.keeps[i], opened.hidden)
            grown = dealt.keeps[i] in dealt.operands.values()
            out.append((opened.public, opened.hidden.share if grown else opened.share))
        else:
            out.append(share_of(value))
    if dealing.violations is not None:
        out.append(sum(dealing.violations, jnp.zeros((), jnp.int64)))
    return out


def share_of(value: Value) -> Any:
    """The value as a share, whatever else is known of it."""
    if value.share is None:
        value.share = value.views["operand"].share
    return value.share


@dataclass(frozen=True)
class _Step:
    primitive: Any
    inputs: list[Any]
    outputs: list[Any]
    params: dict[str, Any]


def _inline(jaxpr: Any) -> tuple[list[_Step], dict[Any, Any]]:
    """The equations of a jaxpr with calls that hold primitives of ours opened up, and the renaming of inner variables."""
    steps: list[_Step] = []
    renamed: dict[Any, Any] = {}

    def walk(inner: Any, fresh: Callable[[Any], Any]) -> None:
        for eqn in inner.eqns:
            name = eqn.primitive.name
            held = [sub for sub in _subjaxprs(eqn.params) if _holds(sub)]
            if not held:
                steps.append(_Step(eqn.primitive, [fresh(v) for v in eqn.invars], [fresh(v) for v in eqn.outvars], eqn.params))
            elif name in _CALLS:
                _enter(eqn, fresh)
            else:
                raise UserError(
                    f"{name}: dealer protocols cannot run inside it, since each round needs its own masks; unroll the loop"
                )

    def _enter(eqn: Any, fresh: Callable[[Any], Any]) -> None:
        inner, consts = called(eqn)
        scope: dict[Any, Any] = {}

        def inside(v: Any) -> Any:
            return v if isinstance(v, Literal) else scope.setdefault(v, object())

        for variable, arg in zip(inner.invars, eqn.invars, strict=True):
            scope[variable] = fresh(arg)
        for variable, const in zip(inner.constvars, consts, strict=True):
            scope[variable] = Literal(const, variable.aval)
        walk(inner, inside)
        for outer, result in zip(eqn.outvars, inner.outvars, strict=True):
            renamed[fresh(outer)] = inside(result)

    walk(jaxpr, lambda v: v)
    return steps, renamed


def called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that a call runs, and its constants."""
    closed = eqn.params[_CALLS[eqn.primitive.name]]
    return (closed.jaxpr, closed.consts) if hasattr(closed, "jaxpr") else (closed, [])


def is_call(eqn: Any) -> bool:
    """Whether an equation runs a jaxpr with primitives of ours in it, once and whatever the values are."""
    return eqn.primitive.name in _CALLS and _holds(called(eqn)[0])


def _subjaxprs(params: dict[str, Any]) -> Iterable[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr"):
                yield item.jaxpr


def _holds(jaxpr: Any) -> bool:
    """Whether a primitive of ours is in it, at any depth."""
    return any(eqn.primitive in PROTOCOLS or any(_holds(sub) for sub in _subjaxprs(eqn.params)) for eqn in jaxpr.eqns)


def _read(variable: Any, values: dict[Any, Value], renamed: dict[Any, Any]) -> Value | None:
    if isinstance(variable, Literal):
        return Value(variable.val)
    while variable in renamed:
        variable = renamed[variable]
        if isinstance(variable, Literal):
            return Value(variable.val)
    return values.get(variable)


@dataclass
class _Schedule:
    """Runs steps as soon as their inputs are there; protocols that wait for openings share the next message."""

    dealing: Dealing
    values: dict[Any, Value]
    renamed: dict[Any, Any]

    def run(self, steps: list[_Step]) -> None:
        waiting: list[tuple[_Step, Generator]] = []
        while steps or waiting:
            steps = [step for step in steps if not self._start(step, waiting)]
            if waiting:
                self.dealing.flush()
                blocked, waiting = waiting, []
                for step, protocol in blocked:
                    self._advance(step, protocol, waiting)

    def _start(self, step: _Step, waiting: list[tuple[_Step, Generator]]) -> bool:
        inputs = [_read(variable, self.values, self.renamed) for variable in step.inputs]
        if any(value is None for value in inputs):
            if step.primitive in EAGER:
                self.dealing.request(*(value for value in inputs if value is not None))
            return False
        if step.primitive.name in _MOVES and inputs[0] is not None and "operand" in inputs[0].views:
            self.values[step.outputs[0]] = self._moved(step, inputs[0].views["operand"])
        elif (protocol := self.dealing.protocol(step.primitive)) is not None:
            self._advance(step, protocol(self.dealing, *inputs, **step.params), waiting)
        else:
            shares = [share_of(value) for value in inputs if value is not None]
            out = self.dealing.local(step.primitive, shares, step.params)
            for variable, share in zip(step.outputs, out if step.primitive.multiple_results else [out], strict=True):
                self.values[variable] = Value(share)
        return True

    def _moved(self, step: _Step, opened: Opened) -> Value:
        """An opened operand in another shape: still opened."""
        move = _MOVES[step.primitive.name](step.params)
        hidden = self.dealing.recorder.follow(move, move(opened.hidden.share), opened.hidden)
        whole = None if opened.whole is None else move(opened.whole)
        return Value.operand(Opened(move(opened.public), hidden, opened.modulus, whole))

    def _advance(self, step: _Step, protocol: Generator, waiting: list[tuple[_Step, Generator]]) -> None:
        try:
            next(protocol)
            waiting.append((step, protocol))
        except StopIteration as done:
            self.values[step.outputs[0]] = done.value if isinstance(done.value, Value) else Value(done.value)
