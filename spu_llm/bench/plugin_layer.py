"""The benchmarked layer on the plugin's protocols: same weights and inputs as on stock SPU, softmax relative to position 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from ..dealer.material import Recorder
from ..models.cache import Window
from ..models.config import DecoderConfig
from ..models.fixed_block import BITS, STREAM_BITS, BlockParams, BlockPlan, block, encode_angles, encode_layer
from ..models.fixed_experts import RoutingPlan
from ..models.folded import fold_layer
from ..primitives import functions
from ..primitives.attention import Place, RowCache, SoftmaxPlan
from ..primitives.dealing import Dealing, with_material
from ..primitives.fixed import Fixed, encode
from ..primitives.norm import NormPlan, root_table
from ..runtime import ProtocolConfig, Session, Slot
from ..runtime.assisted import TRUST, Assisted, OperandName, OperandSlot, offline

_LEAST_PERIOD = 64.0
_WORD = 8  # bytes of an element of the ring


def bench_plugin_layer(
    config: DecoderConfig, params: Any, x: np.ndarray, cache: Any, place: Window, repeats: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of one pass after set-up, and the layer's output: centred for families whose norms subtract the mean.

    `openings` are the bytes of each message, in order.
    """
    context = int(place.start)
    plan = _plan(config, context + 1)
    with Session(ProtocolConfig()) as session:
        assisted = Assisted(session)
        encoded = encode_layer(fold_layer(config, params), plan.norm, (1.0, 1.0))
        names, slots = _place(session, assisted, config, encoded, x, cache, place)
        keeps = (None, *(part.raw for part in slots[2]))
        function = partial(block, config, plan)
        program = assisted.compile("layer", function, slots, keeps)
        results = ["y", OperandName("new.keys"), OperandName("new.values")]
        seconds = []
        for i in range(repeats + 1):  # the first pass warms up
            with session.phase(f"pass {i}") as phase:
                assisted.run(program, names, results, {"start": context})
            seconds.append(phase.seconds)
        dealt = session.phases[offline(f"pass {repeats}")]
        y = session.receive("y") / 2.0**STREAM_BITS
    return {
        "bytes": phase.bytes,
        "messages": phase.messages,
        "openings": _openings(function, slots, keeps),
        "seconds": median(seconds[1:]),
        "failure_probability": 0.0,  # every truncation is exact within its bound
        "trust": TRUST,
        "dealer_bytes": program.dealer_bytes,
        "dealer_seconds": dealt.seconds,
        "operations": {name: vars(cost) for name, cost in phase.ops.items() if cost.seconds > 1e-4},
    }, y


@dataclass
class _Counting(Dealing):
    """Writes down the size of each message."""

    sizes: list[int] = field(default_factory=list)

    def flush(self) -> None:
        self.sizes.append(sum(_WORD * prod(request.masked.shape) for request in self.pending))
        super().flush()


def _openings(function: Callable, slots: tuple, keeps: tuple[OperandSlot | None, ...]) -> list[int]:
    """Bytes of each message of a program that `Assisted` compiles of this, as its protocols ask for them: nothing is run."""
    leaves, tree = jax.tree_util.tree_flatten(slots, is_leaf=lambda x: isinstance(x, (Slot, OperandSlot)))
    shapes = [jax.ShapeDtypeStruct(leaf.shape, np.int64) for leaf in leaves]
    operands = {i: leaf.name for i, leaf in enumerate(leaves) if isinstance(leaf, OperandSlot)}
    kept = {i: leaf.name for i, leaf in enumerate(keeps) if leaf is not None}
    counting = _Counting(Recorder(lambda count: jnp.zeros(count, np.int64)))
    with enable_x64():
        dealt = with_material(lambda *flat: function(*tree.unflatten(flat)), shapes, operands, kept)
        arguments = [(shape, shape) if i in operands else shape for i, shape in enumerate(shapes)]
        jax.eval_shape(lambda *flat: dealt.evaluate(counting, flat), *arguments)
    return counting.sizes


def _plan(config: DecoderConfig, length: int) -> BlockPlan:
    """Tables that the benchmark's inputs fit: unit variance, scores within a few units of position 0's."""
    period = max(_LEAST_PERIOD, 4.0 * length)
    exp = functions.exponential(-18.0, 3.0, 32, 0, 5)
    softmax = SoftmaxPlan(exp, functions.reciprocal(0.5, period, 1024, 3))
    silu = functions.silu()
    activation = {"gpt2": functions.gelu(approximate=True), "llama": silu, "mixtral": silu, "opt": None}[config.family]
    routing = None if config.experts is None else RoutingPlan(SoftmaxPlan(exp, functions.reciprocal(0.5, 127.98, 8192, 3)), 0.0)
    return BlockPlan(NormPlan(root_table(config.width, 0.25, 16.0, 256), config.epsilon), softmax, activation, routing)


def _place(
    session: Session, assisted: Assisted, config: DecoderConfig, encoded: BlockParams, x: np.ndarray, cache: Any, place: Window
) -> tuple[tuple, tuple]:
    """Put everything where it belongs: trees of names and of slots for the program's arguments."""

    def operand(name: str, value: Fixed, transposed: bool) -> tuple[Fixed, Fixed]:
        kept = assisted.mask_operand(name, value.raw, "owner", transposed, grows=not transposed)
        return value.with_raw(kept), value.with_raw(OperandSlot(name, value.shape, transposed))

    def shared(name: str, value: Fixed, owner: str) -> tuple[Fixed, Fixed]:
        session.share(name, value.raw, owner)
        return value.with_raw(name), value.with_raw(Slot(value.shape, np.int64))

    def public(name: str, value: Any) -> tuple[str, Slot]:
        session.publish(name, value)
        return name, Slot(np.shape(value), np.int64, public=True)

    def weight(name: str, value: Any) -> tuple[Any, Any]:
        if value is None:
            return None, None
        return shared(name, value, "owner") if name.endswith("bias") else operand(name, value, True)

    weights = {name: weight(name, value) for name, value in encoded._asdict().items()}
    rows = [operand(name, Fixed(encode(value, BITS), BITS), False) for name, value in zip(("keys", "values"), cache, strict=True)]
    centred = x if config.llama_like else x - x.mean(-1, keepdims=True)
    stream = shared("x", Fixed(encode(centred, STREAM_BITS), STREAM_BITS), "client")
    where = [public("start", np.int64(place.start)), public("mask", place.mask.astype(np.int64))]
    angles = encode_angles(place.cos, place.sin, int(place.start))
    turns = [public(name, value) for name, value in angles._asdict().items()]

    def side(i: int) -> tuple:
        return (
            BlockParams(**{name: pair[i] for name, pair in weights.items()}),
            stream[i],
            RowCache(*(pair[i] for pair in rows)),
            Place(*(pair[i] for pair in where)),
            type(angles)(*(pair[i] for pair in turns)),
        )

    return side(0), side(1)
