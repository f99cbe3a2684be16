"""A user's function made into a program of the primitives, without touching the function, its libraries or JAX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from itertools import count
from functools import partial, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

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


_PROGRAMS = count()  # a session keeps programs by name, so each needs its own


class Plugin:
    """What `spu_llm.enable` makes of a function."""

    def __init__(
        self,
        function: Callable,
        public: Mapping[str, Any] | None = None,
        ranges: Ranges | None = None,
        dealer: bool = True,
        softmax_reference: str = "max",
        precision: Precision | None = None,
    ):
        if softmax_reference not in ("max", "first"):
            raise UserError(f"softmax_reference is {softmax_reference!r}; use 'max' or 'first'")
        self.function = function
        self.public = dict(public or {})
        self.ranges = ranges or Ranges()
        self.dealer = dealer
        self.softmax_reference = softmax_reference
        self.precision = precision or Precision()
        self._traced: dict[Any, Traced] = {}
        self._keys = (os.urandom(16), os.urandom(16))
        self._runs = Counter(None)
        update_wrapper(self, function, updated=())
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def program(self, material: Any, *args: Any, **kwargs: Any) -> Any:
        """The dealer program: what to hand to SPU. `material` is int64 [words] from `deal`, secret; the rest as in the function."""
        if material.dtype != jnp.int64:
            raise UserError(
                f"material of {self.__name__} arrives as {material.dtype}, which cannot mask 64-bit values; run the call inside "
                "jax.experimental.enable_x64()"
            )
        traced = self.traced(args, kwargs)
        if material.shape != (traced.dealt.specification.words,):
            raise UserError(
                f"material of {self.__name__} has {material.shape[0]} words, but these shapes need "
                f"{traced.dealt.specification.words}; deal for the arguments of this call"
            )
        return traced.tree.unflatten(traced.dealt(material, *jax.tree_util.tree_leaves((args, kwargs))))

    def deal(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Material for one run on arguments of these shapes (values are not looked at): int64 [words], never to be used twice."""
        specification = self.traced(args, kwargs).dealt.specification
        run = self._runs.take()
        dealt = Dealer(self._keys).deal(specification, run)
        shares = [receive(specification, rank, self._keys[rank], run, message) for rank, message in enumerate(dealt.messages)]
        return shares[0] + shares[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function with the primitives' own arithmetic in plaintext; with `dealer=False`, also what to hand to SPU."""
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if self.dealer and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UserError(
                f"{self.__name__} needs material: run spu_fn({self.__name__}.program)({self.__name__}.deal(*args), *args) on SPU, or "
                "enable it with dealer=False"
            )
        traced = self.traced(args, kwargs)
        if not self.dealer:
            return traced.tree.unflatten(self._floating(traced, leaves))
        with enable_x64():
            out = jax.jit(partial(traced.fixed, plaintext=True))(*map(np.asarray, leaves))
        return traced.tree.unflatten([np.asarray(each).astype(dtype) for each, dtype in zip(out, traced.dtypes, strict=True)])

    def compile(self, assisted: Assisted, *args: Any, **kwargs: Any) -> DealtProgram:
        """The program for our own Session, for arguments of these shapes (arrays or anything with `shape` and `dtype`)."""
        traced = self.traced(args, kwargs)
        slots = tuple(Slot(tuple(shape.shape), shape.dtype) for shape in traced.shapes)

        def function(*leaves: Any) -> Any:
            return traced.tree.unflatten(traced.fixed(*leaves))

        name = f"{self.__name__}.{next(_PROGRAMS)}"
        return assisted.compile(name, function, slots, (None,) * len(traced.dtypes))

    def traced(self, args: tuple, kwargs: dict) -> Traced:
        """The function for arguments of these shapes; traced afresh the first time, whatever JAX has cached of it."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        shapes = [jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf)) for leaf in leaves]
        key = (tree, tuple((shape.shape, str(shape.dtype)) for shape in shapes))
        if key not in self._traced:
            self._traced[key] = Traced(self, tree, shapes)
        return self._traced[key]

    def _floating(self, traced: Traced, leaves: list[Any]) -> list[Any]:
        return traced.evaluate(FloatEngine(), leaves)


class Traced:
    """A function for one set of shapes."""

    def __init__(self, plugin: Plugin, tree: Any, shapes: list[jax.ShapeDtypeStruct]):
        self.plugin = plugin
        self.shapes = shapes

        def flat(*leaves: Any) -> Any:
            args, kwargs = tree.unflatten(leaves)
            args, kwargs = _with_public(plugin.function, plugin.public, args, kwargs)
            return plugin.function(*args, **kwargs)

        with jax.experimental.disable_x64():
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

    def evaluate(self, engine: Any, leaves: Any) -> list[Any]:
        """Interpret the function in an engine."""
        interpreter = Interpreter(engine, self.plugin.softmax_reference)
        secrets = [_argument(engine, leaf, shape) for leaf, shape in zip(leaves, self.shapes, strict=True)]
        out = []
        for variable, value in zip(self.jaxpr.jaxpr.outvars, interpreter.run(self.jaxpr, secrets), strict=True):
            if is_public(value):
                out.append(jnp.asarray(value))
            else:
                secret = interpreter.plain(_Output(variable), value)
                out.append(engine.leave(secret.array(), variable.aval.dtype))
        return out


class _Output:
    """Stands for the equation "return" in messages."""

    def __init__(self, variable: Any):
        self.outvars = [variable]
        self.primitive = type("Return", (), {"name": "return"})
        self.source_info = jax._src.source_info_util.current()


def _argument(engine: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> Secret:
    return Secret(tuple(shape.shape), shape.dtype, partial(engine.enter, leaf))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _with_public(function: Callable, public: Mapping[str, Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with the public values in the places of the secret ones of the same names."""
    if not public:
        return args, kwargs
    names = list(inspect.signature(function).parameters)
    args = tuple(public.get(names[i], arg) if i < len(names) else arg for i, arg in enumerate(args))
    return args, {**kwargs, **{name: value for name, value in public.items() if name not in names[: len(args)]}}


def enable(function: Callable | None = None, **options: Any) -> Any:
    """Make a function of JAX or Flax use the primitives."""
    if function is None:
        return partial(enable, **options)
    return Plugin(function, **options)


def calibrate(plugin: Plugin | Callable, *samples: tuple, **options: Any) -> Ranges:
    """Ranges of every site, from running the function in plaintext on sample argument tuples."""
    if not isinstance(plugin, Plugin):
        plugin = Plugin(plugin, **options)
    engine = FloatEngine({})
    for args in samples:
        traced = plugin.traced(tuple(args), {})
        leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves((tuple(args), {}))]
        for engine.drift in (-1, 1):
            traced.evaluate(engine, leaves)
    return Ranges(dict(engine.seen or {}), engine.largest).widened()
