"""A user's function as a program of the primitives, made without touching the function, its libraries or JAX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from itertools import count
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import disable_x64, enable_x64

from ..dealer.generator import Dealer, receive
from ..dealer.store import Counter
from ..errors import UserError
from ..primitives.dealing import Dealt, with_material
from ..runtime.assisted import Assisted, DealtProgram
from ..runtime.program import Slot
from . import dots, elementwise, local  # noqa: F401  (they register their rules)
from .engine import FixedEngine, FloatEngine, Precision
from .interpret import Interpreter
from .ranges import Ranges
from .values import Secret, is_public

SoftmaxReference = Literal["max", "first"]
"""What softmax subtracts of each row."""

_PROGRAMS = count()  # a session keeps programs by name, so each needs its own


class Plugin:
    """What `spu_llm.enable` makes of a function; see there.

    The function is traced once for each set of argument shapes, as `jax.jit` does: what it closes over is fixed then. Every
    argument is a secret, but for those given in `public`; results stay secret. Pickled, it takes its settings along and no key.
    """

    def __init__(
        self,
        function: Callable,
        *,
        public: Mapping[str, Any] | None = None,
        ranges: Ranges | None = None,
        dealer: bool = True,
        softmax_reference: SoftmaxReference = "max",
        precision: Precision | None = None,
    ) -> None:
        if softmax_reference not in ("max", "first"):
            raise UserError(f"softmax_reference is {softmax_reference!r}; use 'max' or 'first'")
        self.function = function
        self.public = dict(public or {})
        self.ranges = ranges or Ranges()
        self.dealer = dealer
        self.softmax_reference = softmax_reference
        self.precision = precision or Precision()
        self._start()

    def _start(self) -> None:
        update_wrapper(self, self.function, updated=())
        self.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        self._traced: dict[Any, Traced] = {}
        self._keys = (os.urandom(16), os.urandom(16))
        self._runs = Counter(None)

    def __getstate__(self) -> dict[str, Any]:
        """Settings only. Another process makes keys of its own, so no mask of this one can come back there."""
        names = ("function", "public", "ranges", "dealer", "softmax_reference", "precision")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def program(self, material: Any, *args: Any, **kwargs: Any) -> Any:
        """The dealer program, to be handed to SPU: the function with `material`, int64 [words] from `deal`, before its arguments.

        Material and arguments are secret to SPU. Only values masked by fresh material are opened.
        """
        if material.dtype != jnp.int64:
            raise UserError(
                f"material of {self.__name__} arrives as {material.dtype}, which cannot mask 64-bit values; make and run the "
                "call with jax_enable_x64 on (environment JAX_ENABLE_X64=1, or jax.experimental.enable_x64())"
            )
        traced = self.traced(args, kwargs)
        words = traced.dealt.specification.words
        if material.shape != (words,):
            raise UserError(
                f"material of {self.__name__} has shape {material.shape}, but these arguments need ({words},); deal for "
                "the same shapes"
            )
        return traced.tree.unflatten(traced.dealt(material, *jax.tree_util.tree_leaves((args, kwargs))))

    def deal(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Material for one run on arguments of these shapes: int64 [words]. Values are not looked at, only shapes and types.

        Whoever calls this is the dealer: it may belong to neither of the two parties. Never use the result twice.
        """
        return self.deal_for(self.traced(args, kwargs))

    def deal_for(self, traced: Traced) -> np.ndarray:
        """As `deal`, for a function already traced."""
        specification = traced.dealt.specification
        run = self._runs.take()
        messages = Dealer(self._keys).deal(specification, run).messages
        shares = [receive(specification, rank, self._keys[rank], run, message) for rank, message in enumerate(messages)]
        return shares[0] + shares[1]

    def compile(self, assisted: Assisted, *args: Any, **kwargs: Any) -> DealtProgram:
        """The dealer program for our own Session, for arguments of these shapes: arrays, or anything with `shape` and `dtype`.

        Run it with `assisted.run(program, names, results)`: names of the flat arguments, and a tree of names like the result.
        """
        traced = self.traced(args, kwargs)
        slots = tuple(Slot(tuple(shape.shape), shape.dtype) for shape in traced.shapes)

        def function(*leaves: Any) -> Any:
            return traced.tree.unflatten(traced.fixed(*leaves))

        return assisted.compile(f"{self.__name__}.{next(_PROGRAMS)}", function, slots, (None,) * len(traced.dtypes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function in the primitives' own arithmetic, in plaintext. With `dealer=False`, also what to hand to SPU."""
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if self.dealer and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UserError(
                f"{self.__name__} needs material from a dealer: give SPU f.program and f.deal(*args) before the arguments, or "
                "enable it with dealer=False"
            )
        traced = self.traced(args, kwargs)
        if not self.dealer:
            return traced.tree.unflatten(traced.evaluate(FloatEngine(general=True), leaves))
        with enable_x64():
            out = jax.jit(partial(traced.fixed, plaintext=True))(*map(np.asarray, leaves))
        return traced.tree.unflatten([np.asarray(each).astype(dtype) for each, dtype in zip(out, traced.dtypes, strict=True)])

    def traced(self, args: tuple, kwargs: dict) -> Traced:
        """The function for arguments of these shapes; traced anew the first time, whatever JAX has cached of it."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        shapes = [jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf)) for leaf in leaves]
        key = (tree, tuple((shape.shape, str(shape.dtype)) for shape in shapes))
        if key not in self._traced:
            self._traced[key] = Traced(self, tree, shapes)
        return self._traced[key]


class Traced:
    """A plugin's function for one set of shapes: its jaxpr, in single precision, and what is made of it."""

    def __init__(self, plugin: Plugin, tree: Any, shapes: list[jax.ShapeDtypeStruct]):
        self.plugin = plugin
        self.shapes = shapes

        def flat(*leaves: Any) -> Any:
            args, kwargs = tree.unflatten(leaves)
            args, kwargs = _with_public(plugin.function, plugin.public, args, kwargs)
            return plugin.function(*args, **kwargs)

        with disable_x64():
            self.jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*shapes)
        self.tree = jax.tree_util.tree_structure(out)
        self.dtypes = [leaf.dtype for leaf in jax.tree_util.tree_leaves(out)]
        self._dealt: Dealt | None = None

    @property
    def dealt(self) -> Dealt:
        """The dealer program and its material."""
        if self._dealt is None:
            with enable_x64():
                self._dealt = with_material(self.fixed, self.shapes, {}, {})
        return self._dealt

    def fixed(self, *leaves: Any, plaintext: bool = False) -> tuple[Any, ...]:
        """The function as fixed-point primitives, from arguments and to results as SPU holds them, or as real numbers."""
        return tuple(self.evaluate(FixedEngine(self.plugin.ranges, self.plugin.precision, plaintext), leaves))

    def evaluate(self, engine: Any, leaves: Sequence[Any]) -> list[Any]:
        """Interpret the function in an engine, every argument a secret."""
        interpreter = Interpreter(engine, self.plugin.softmax_reference)
        pairs = zip(leaves, self.shapes, strict=True)
        secrets = [Secret(tuple(shape.shape), shape.dtype, partial(engine.enter, leaf)) for leaf, shape in pairs]
        out = []
        for i, value in enumerate(interpreter.run(self.jaxpr, secrets)):
            if is_public(value):
                out.append(jnp.asarray(value))
            else:
                out.append(engine.leave(interpreter.plain(f"result {i} of {self.plugin.__name__}", value).array(), self.dtypes[i]))
        return out


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _with_public(function: Callable, public: Mapping[str, Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with the public values in the places of those of the same names, whether these were passed or not."""
    if not public:
        return args, kwargs
    parameters = inspect.signature(function).parameters
    keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in public if name not in parameters and not keywords]
    if unknown:
        raise UserError(f"public={unknown[0]!r} is no argument of the function; it has {', '.join(parameters)}")
    names = list(parameters)
    args = tuple(public.get(names[i], arg) if i < len(names) else arg for i, arg in enumerate(args))
    return args, {**kwargs, **{name: value for name, value in public.items() if name not in names[: len(args)]}}
