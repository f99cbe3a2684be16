"""What each step of a decoder layer sends, in the order in which they are taken: the plugin's openings, and stock SPU's operations.

The plugin sends one message an opening, whose size is known as it is traced. SPU's log has sums by kind of operation, so the layer
is cut short behind each step, run so far, and the shorter run's traffic taken from the longer one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
from jax.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.experimental import enable_x64

from ..errors import UserError
from ..models.cache import Window, window
from ..models.decoder import Decoder
from ..runtime import ProtocolConfig, Session, Slot
from .layer import LayerShape, layer_inputs, share_layer

Steps = list[dict[str, Any]]
"""name, messages and bytes of each; their sums are the layer's."""

_ALONE = ("dot_general", "reduce_max", "exp")  # operations that are steps of their own
_STOCK = (
    *("norm", "qkv product", "heads", "scores", "mask", "largest score", "difference", "exponentials", "1 / sum, division"),
    *("mixed values", "heads put together", "output product", "norm", "up product", "activation", "down product", "sum"),
)
"""Steps of every family without experts: those operations, and what is between them."""
_NORM = "inverse root", "norm"
_ACTIVATION = {"gpt2": ("activation",), "llama": ("activation", "gate"), "opt": ("sign", "sign, once more", "activation")}


def check_steps(shape: LayerShape, protocol: ProtocolConfig, ops: str) -> None:
    """Raise UserError for a layer whose steps cannot be told apart."""
    if protocol.name != "SEMI2K":
        raise UserError(f"--steps: on {protocol.name} passes differ in what they send, so no step's share is known; use SEMI2K")
    if shape.experts is not None or ops == "generic":
        what = "--ops generic" if ops == "generic" else f"--family {shape.family}"
        raise UserError(f"--steps: {what} has steps of another kind; leave --steps out")


def layer_steps(shape: LayerShape, protocol: ProtocolConfig, result: dict[str, Any]) -> dict[str, Any]:
    """The `result` of `bench_layer` with `steps` of the layer, and of stock SPU's beside it."""
    stock = {"steps": stock_steps(shape, protocol)}
    if "stock" not in result:
        return {**result, **stock}
    named = zip(plugin_names(shape.family), result["openings"], strict=True)
    steps = [{"name": name, "messages": 1, "bytes": size} for name, size in named]
    return {**result, "steps": steps, "stock": {**result["stock"], **stock}}


def plugin_names(family: str) -> list[str]:
    """What is computed of what each message opens (fixed_block.py)."""
    attention = "squares, qkv product", *_NORM, "scores", "exponentials", "mixed values, 1 / sum", "division", "truncation"
    return [*attention, "output product", "squares, up product", *_NORM, *_ACTIVATION[family], "truncation", "down product"]


def stock_steps(shape: LayerShape, protocol: ProtocolConfig) -> Steps:
    """Steps of SPU's own operations, masked weights opened before; those that send nothing are left out."""
    config = shape.config()
    params, x, cache = layer_inputs(config, shape.context)
    place = window(config, shape.context, 1, shape.context + 1)
    with enable_x64():  # as programs are compiled
        traced = jax.make_jaxpr(Decoder(config, {}).block)(params, x, cache, place)
    with Session(protocol) as session:
        names = share_layer(session, params, x, cache, place)
        slots = jax.tree_util.tree_map(lambda value: Slot(value.shape), (params, x, cache))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        taken = _Taken(session, *map(jax.tree_util.tree_leaves, ((*slots, public), names)))
        sent = [(0, 0), *(taken.of(f"step {i}", part) for i, part in enumerate(_parts(traced)))]
    found = [
        {"name": name, "messages": after[0] - before[0], "bytes": after[1] - before[1]}
        for name, (before, after) in zip(_STOCK, pairwise(sent), strict=True)
    ]
    return [step for step in found if step["messages"] or step["bytes"]]


class _Taken:
    """Runs of parts of a program on the same arguments."""

    def __init__(self, session: Session, slots: Sequence[Slot], names: Sequence[str]):
        self._session, self._slots, self._names = session, tuple(slots), tuple(names)

    def of(self, name: str, part: Callable) -> tuple[int, int]:
        """Messages and bytes of a run of a part."""
        program = self._session.compile(name, part, self._slots)
        results = [f"{name}.{i}" for i in range(program.outputs.num_leaves)]
        with self._session.phase(name) as phase:
            self._session.run(program, self._names, results)
        return phase.messages, phase.bytes


def _parts(traced: ClosedJaxpr) -> list[Callable]:
    """The program up to the end of each step; what later ones need of it is its result."""
    eqns = traced.jaxpr.eqns
    alone = [i for i, eqn in enumerate(eqns) if eqn.primitive.name in _ALONE]
    ends = sorted({end for i in alone for end in (i, i + 1)} | {len(eqns)})
    return [jaxpr_as_fun(ClosedJaxpr(_cut(traced.jaxpr, end), traced.consts)) for end in ends]


def _cut(jaxpr: Jaxpr, end: int) -> Jaxpr:
    made = [variable for eqn in jaxpr.eqns[:end] for variable in eqn.outvars]
    used = {v for eqn in jaxpr.eqns[end:] for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    return jaxpr.replace(eqns=jaxpr.eqns[:end], outvars=[v for v in made if v in used], debug_info=None)
