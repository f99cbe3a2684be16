"""`spu_llm.enable`: of a function, as a decorator, or for a block in which `sim_jax` is left as the user wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from itertools import count
from typing import Any, overload

import jax
import numpy as np
from jax.experimental import enable_x64
from spu import libspu
from spu.utils import frontend, simulation

from ..errors import UserError
from ..primitives.stock import FRACTION_BITS
from ..runtime.program import Program
from ..runtime.trust import check_trust
from .engine import Precision
from .plugin import Plugin, SoftmaxReference, Traced
from .ranges import Ranges


@overload
def enable(
    function: Callable,
    *,
    public: Mapping[str, Any] | None = None,
    ranges: Ranges | None = None,
    dealer: bool = True,
    softmax_reference: SoftmaxReference = "max",
    precision: Precision | None = None,
) -> Plugin: ...


@overload
def enable(
    *,
    public: Mapping[str, Any] | None = None,
    ranges: Ranges | None = None,
    dealer: bool = True,
    softmax_reference: SoftmaxReference = "max",
    precision: Precision | None = None,
) -> _Enabling: ...


def enable(function: Callable | None = None, **options: Any) -> Plugin | _Enabling:
    """Make unmodified JAX or Flax code use the primitives. `enable(f)` is a `Plugin`; `enable()` a decorator and a context manager.

    Of a function, or as a decorator, nothing is patched. The material enters as one more secret argument, before the others::

        f = spu_llm.enable(f, ranges=spu_llm.calibrate(f, samples))
        with jax.experimental.enable_x64():                        # or JAX_ENABLE_X64=1: an int64 must not shrink
            y = sim_jax(sim, f.program)(f.deal(x, w), x, w)        # the simulator
        material = dealer_pyu(f.deal)(x_shape, w_shape).to(spu)    # a SecretFlow device; the dealer is a party of its own
        y = spu(f.program)(material, x, w)
        program = f.compile(assisted, x, w)                        # our Session
        assisted.run(program, ("x", "w"), "y")

    As a context manager it replaces `spu.utils.frontend.compile` and `Simulator.__call__` until the block ends, so that a
    `sim_jax(sim, f)(x, w)` inside deals, adds and uses up material by itself. It holds for all threads of the process.

    `public` gives the values of arguments that every party may know (an attention mask), by name. They are constants of the
    program. `ranges` come from `calibrate`; without, functions get usual ranges (see ranges.py), which nobody has checked.
    `softmax_reference` is "max" (about the maximum, by log2(n) openings) or "first" (each row's first score that counts: no
    opening, right where calibration shows that it is near the maximum). `precision` is a `Precision`. `dealer=False` keeps
    SPU's own operations, for any of its protocols; only masks are then handled here.

    Raises `UserError` for options that do not fit; when the function is traced, for an operation that has no secure form; and,
    as a context manager, for a runtime other than SEMI2K in FM64 between two parties.
    """
    return _Enabling(options) if function is None else Plugin(function, **options)


class _Enabling:
    """`enable()` without a function."""

    def __init__(self, options: dict[str, Any]):
        Plugin(_nothing, **options)  # refuses bad options where they are written
        self._options = options
        self._saved: list[tuple[Callable, Callable]] = []
        self._waiting: dict[str, tuple[Plugin, Traced]] = {}

    def __call__(self, function: Callable) -> Plugin:
        return Plugin(function, **self._options)

    def __enter__(self) -> _Enabling:
        compile_, call = frontend.compile, simulation.Simulator.__call__
        self._saved.append((compile_, call))
        frontend.compile = _same_name(compile_, self._compile)
        simulation.Simulator.__call__ = _same_name(call, self._caller(call))
        return self

    def __exit__(self, *_: Any) -> None:
        frontend.compile, simulation.Simulator.__call__ = self._saved.pop()
        self._waiting.clear()

    def _compile(
        self, kind: Any, function: Callable, args: Any, kwargs: Any, names: Any, visibility: Any, outputs: Any, **more: Any
    ) -> Any:
        """`frontend.compile` of the function's program, with an input for material after the others."""
        original = self._saved[-1][0]
        if kind != frontend.Kind.JAX or _is_ours(function):
            return original(kind, function, args, kwargs, names, visibility, outputs, **more)
        plugin, fixed = self._plugin(function, args, more.pop("static_argnums", ()), more.pop("static_argnames", None))
        args = [arg for i, arg in enumerate(args) if i not in fixed]
        if not plugin.dealer:
            return original(kind, plugin, args, kwargs, names, visibility, outputs, **more)
        leaves = jax.tree_util.tree_leaves((tuple(args), kwargs))
        if not all(isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float)) for leaf in leaves):
            raise UserError(
                "within `with spu_llm.enable()` only sim_jax finds its material by itself; for a Session use enable(f).compile, "
                "for a SecretFlow device spu(enable(f).program)(material, ...)"
            )
        traced = plugin.traced(tuple(args), kwargs)
        dealt, name = traced.dealt, f"spu_llm.material.{next(_NAMES)}"
        self._waiting[name] = plugin, traced

        def program(*inputs: Any) -> Any:
            return traced.tree.unflatten(dealt(inputs[-1], *inputs[:-1]))

        with enable_x64():
            material = jax.ShapeDtypeStruct((dealt.specification.words,), np.int64)
            secret = [*visibility, libspu.Visibility.VIS_SECRET]
            inputs = [*map(np.asarray, leaves), material]
            executable, out = original(kind, program, inputs, {}, [*names, name], secret, outputs, **more)
        check_trust(Program(plugin.__name__, executable.code.decode(), traced.tree, traced.tree))
        return executable, out

    def _plugin(self, function: Callable, args: Any, static: Any, static_names: Any) -> tuple[Plugin, tuple[int, ...]]:
        """A new plugin for every call, as sim_jax compiles for every call: what the function closes over may have changed."""
        if static_names:
            raise UserError("static_argnames is not supported within spu_llm.enable(); bind those arguments with functools.partial")
        places = (static,) if isinstance(static, int) else tuple(static)
        if isinstance(function, Plugin):
            return function, places

        def bound(*rest: Any, **kwargs: Any) -> Any:
            dynamic = iter(rest)
            return function(*(args[i] if i in places else next(dynamic) for i in range(len(args))), **kwargs)

        return Plugin(_same_name(function, bound) if places else function, **self._options), places

    def _caller(self, original: Callable) -> Callable:
        def call(simulator: simulation.Simulator, executable: libspu.Executable, *values: Any) -> Any:
            plugin, traced = self._waiting.pop(executable.input_names[-1] if executable.input_names else "", (None, None))
            if plugin is None or traced is None:
                return original(simulator, executable, *values)
            check_config(simulator.wsize, simulator.rt_config)
            with enable_x64():
                out = original(simulator, executable, *map(np.asarray, values), plugin.deal_for(traced))
            return [np.asarray(each).astype(dtype) for each, dtype in zip(out, traced.dtypes, strict=True)]

        return call


def check_config(parties: int, config: libspu.RuntimeConfig) -> None:
    """Raise UserError for a runtime that dealer programs are not made for."""
    wrong = {
        "protocol": config.protocol != libspu.ProtocolKind.SEMI2K,
        "field": config.field != libspu.FieldType.FM64,
        "number of parties": parties != 2,
        "fxp_fraction_bits": config.fxp_fraction_bits not in (0, FRACTION_BITS),
    }
    bad = [name for name, differs in wrong.items() if differs]
    if bad:
        raise UserError(
            f"the {bad[0]} of this simulator is not what dealer programs run on (SEMI2K, FM64, 2 parties, "
            f"{FRACTION_BITS} fraction bits); change it, or use enable(dealer=False)"
        )


_NAMES = count()


def _nothing() -> None:
    pass


def _is_ours(function: Callable) -> bool:
    return getattr(function, "__module__", None) == "spu_llm.runtime.program" or isinstance(
        getattr(function, "__self__", None), Plugin
    )


def _same_name(original: Callable, wrapper: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return update_wrapper(call, original)
