"""Taking the k active of b blocks of hidden units: by disclosed places in a secret order, or by a plain secret gather (Comet).

All ways begin with a token's secret scores of blocks and the input y of the product with `up`, and end with shares of the active
blocks' units. `bits` is what all have: secret bits of the k chosen blocks.
- `disclosed`: the bits are moved into a secret order and opened, active blocks picked by public places. A `shuffle` of `up` into
  that order came before; it serves many tokens.
- `units`: the product is made of all blocks, and a one-hot matrix [b, k] of the bits times its result gives the active ones.
- `weights`: the one-hot matrix times `up` gives the active blocks' weights, which then have to be opened and multiplied.
The last two disclose nothing. Values are random; costs depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..comet.fixed_sparse import SCORE_BITS, SIZE_BITS
from ..comet.stock_sparse import active_outputs
from ..models.fixed_block import BITS, NORM_KERNEL_BITS, STREAM_BITS
from ..network import NetworkProfile
from ..primitives.active import active_contract
from ..primitives.choose import choose
from ..primitives.contract import contract
from ..primitives.disclose import disclose, places
from ..primitives.fixed import Fixed, encode
from ..primitives.permute import permutation, permute
from ..primitives.rows import seal
from ..primitives.select import one_hot
from ..primitives.stock import FRACTION_BITS, as_real, as_ring
from ..progress import Progress, silent
from ..runtime import ProtocolConfig, Session, Slot
from ..runtime.assisted import TRUST, Assisted, OperandName, OperandSlot
from .costs import less, measured, ratios

Runs = dict[str, Callable[[], None]]


@dataclass(frozen=True)
class IndexShape:
    """Blocks of `size` units each, of which `active` are taken; width of the input."""

    blocks: int
    active: int
    size: int
    width: int


def bench_indexing(
    ops: str,
    protocol: ProtocolConfig,
    shape: IndexShape,
    networks: Sequence[NetworkProfile] = (),
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A `Cost` (see costs.py) of each way, for one token, and of a shuffle, which serves as many tokens as one likes.

    ratio: of `units` and `weights` over `disclosed`; above_bits: the same of messages and bytes beyond those of `bits`.
    break_even_tokens: for how many tokens an order has to serve until a shuffle's bytes are saved. max_error: the largest
    difference of the ways' results from plaintext.
    """
    inputs = _inputs(shape)
    with Session(protocol) as session:
        runs = (_plugin if ops == "plugin" else _stock)(session, shape, inputs)
        costs = measured(session, runs, networks, repeats, progress)
        real = _decoded if ops == "plugin" else np.asarray
        want = _want(inputs)
        errors = {way: float(np.abs(real(session.receive(way)) - want).max()) for way in ("disclosed", "units", "weights")}
    secret = ("units", "weights")
    above = {way: less(costs[way], costs["bits"]) for way in ("disclosed", *secret)}
    counts = ("messages", "bytes")
    saved = {way: costs[way]["bytes"] - costs["disclosed"]["bytes"] for way in secret}
    return {
        "ops": ops,
        "protocol": protocol.name,
        "trust": TRUST if ops == "plugin" else protocol.trust,
        "blocks": [shape.active, shape.blocks],
        "size": shape.size,
        "width": shape.width,
        **costs,
        "ratio": {way: ratios(costs[way], costs["disclosed"]) for way in secret},
        "above_bits": {way: {key: above[way][key] / above["disclosed"][key] for key in counts} for way in secret},
        "break_even_tokens": {way: costs["shuffle"]["bytes"] / each if each > 0 else None for way, each in saved.items()},
        "max_error": errors,
    }


@dataclass(frozen=True)
class _Inputs:
    """scores [1, b], y [1, width], up [b, size, width]."""

    scores: np.ndarray
    y: np.ndarray
    up: np.ndarray


def _inputs(shape: IndexShape) -> _Inputs:
    random = np.random.default_rng(0)
    above = random.permutation(shape.blocks)[None] - (shape.blocks - shape.active - 0.5)  # as many as are taken score above 0
    scores = above / shape.blocks
    y = random.standard_normal((1, shape.width))
    return _Inputs(scores, y, random.standard_normal((shape.blocks, shape.size, shape.width)) / shape.width**0.5)


def _want(inputs: _Inputs) -> np.ndarray:
    return (inputs.up[inputs.scores[0] > 0] @ inputs.y[0])[None]


def _decoded(raw: np.ndarray) -> np.ndarray:
    """The plugin's products as reals: what truncating y while it was opened left of the ring is right."""
    lost = STREAM_BITS - BITS
    return (raw.astype(np.int64) << lost >> lost) / 2.0 ** (BITS + NORM_KERNEL_BITS)


def _hot(bits: Fixed, count: int) -> Fixed:
    """[n, b, count]: column j has its 1 at the j-th one of the bits [n, b]. Local, a product and a one-hot: 2 rounds."""
    place = bits.with_raw(bits.raw @ np.triu(np.ones((bits.shape[-1],) * 2, np.int64)))
    found = one_hot(contract("nb,nb->nb", bits, place), count + 1)
    return found[..., 1:]


# On the plugin


def _plugin(session: Session, shape: IndexShape, inputs: _Inputs) -> Runs:
    assisted, k = Assisted(session), shape.active
    session.share("scores", encode(inputs.scores, 2 * SCORE_BITS), "owner")
    session.share("y", encode(inputs.y, STREAM_BITS), "client")
    operand = assisted.mask_operand("up", encode(inputs.up, NORM_KERNEL_BITS), "owner")
    scores = Fixed(Slot(inputs.scores.shape, np.int64), 2 * SCORE_BITS)
    y = Fixed(Slot(inputs.y.shape, np.int64), STREAM_BITS)
    up = Fixed(OperandSlot("up", inputs.up.shape), NORM_KERNEL_BITS)
    order_operand = assisted.mask_operand("order", np.eye(shape.blocks, dtype=np.int64), "owner")
    order = Fixed(OperandSlot("order", (shape.blocks,) * 2), 0)

    def bits(scores: Fixed) -> Fixed:
        return choose(scores, k, SIZE_BITS)

    def disclosed(scores: Fixed, y: Fixed, up: Fixed, order: Fixed) -> Any:
        index = places(disclose(contract("nb,pb->np", bits(scores), order)), k)
        return active_contract("nd,bsd->nbs", y, up, index, BITS).raw

    def units(scores: Fixed, y: Fixed, up: Fixed) -> Any:
        return contract("nbk,nbs->nks", _hot(bits(scores), k), contract("nd,bsd->nbs", y, up, BITS)).raw

    def weights(scores: Fixed, y: Fixed, up: Fixed) -> Any:
        return contract("nd,nksd->nks", y, contract("nbk,bsd->nksd", _hot(bits(scores), k), up), BITS).raw

    def shuffle(up: Fixed) -> Any:
        return seal(permute(permutation(shape.blocks), up)).raw

    def run(name: str, function: Callable, slots: tuple, names: tuple, result: Any = None, keep: Any = None) -> Callable[[], None]:
        program = assisted.compile(name, function, slots, (keep,))
        return partial(assisted.run, program, names, [result or name])

    slots, names = (scores, y, up), ("scores", "y", operand)
    return {
        "bits": run("bits", lambda scores: bits(scores).raw, slots[:1], names[:1]),
        "disclosed": run("disclosed", disclosed, (*slots, order), (*names, order_operand)),
        "units": run("units", units, slots, names),
        "weights": run("weights", weights, slots, names),
        "shuffle": run("shuffle", shuffle, (up,), (operand,), OperandName("moved"), OperandSlot("moved", inputs.up.shape)),
    }


# On stock SPU


def _stock(session: Session, shape: IndexShape, inputs: _Inputs) -> Runs:
    """`up` as the layer has it (see stock_sparse.py), and once more as the secret gather multiplies it, ring integers of a block a
    row: each a static operand where the protocol has these.
    """
    k, size, is_dense = shape.active, shape.size, session.protocol.name == "SEMI2K"
    up = inputs.up.astype(np.float32)
    rows = encode(up.reshape(shape.blocks, -1), FRACTION_BITS)
    values = {
        "scores": inputs.scores.astype(np.float32),
        "y": inputs.y.astype(np.float32),
        "up": up.reshape(-1, shape.width).T if is_dense else up,
        "rows": rows,
        **dict.fromkeys(("order", "client", "owner"), np.eye(shape.blocks, dtype=np.int64)),
    }
    for name, value in values.items():
        session.share(name, value, "client" if name in ("y", "client") else "owner")
    for name in ("up", "rows", "order"):
        session.keep_opened(name, Slot(values[name].shape, values[name].dtype))

    def bits(scores: Any) -> Fixed:
        return choose(Fixed(as_ring(scores), FRACTION_BITS), k)

    def disclosed(scores: Any, y: Any, up: Any, order: Any) -> Any:
        moved = Fixed((order @ bits(scores).raw.T).T, 0)
        return active_outputs(y, up, places(disclose(moved), k), is_dense, size)

    def units(scores: Any, y: Any, up: Any) -> Any:
        every = y @ (up if is_dense else up.reshape(-1, shape.width).T)
        return _real(_hot(bits(scores), k).raw[0].T @ as_ring(every).reshape(shape.blocks, size))[None]

    def weights(scores: Any, y: Any, rows: Any) -> Any:
        found = _real(_hot(bits(scores), k).raw[0].T @ rows).reshape(k * size, shape.width)
        return (y @ found.T).reshape(1, k, size)

    def run(name: str, function: Callable, *arguments: str) -> Callable[[], None]:
        slots = tuple(Slot(values[each].shape, values[each].dtype) for each in arguments)
        return partial(session.run, session.compile(name, function, slots), arguments, name)

    move = run("shuffle", lambda client, owner, rows: (client @ owner) @ rows, "client", "owner", "rows")

    def shuffle() -> None:
        move()
        session.keep_opened("shuffle", Slot(rows.shape, rows.dtype))

    return {
        "bits": run("bits", lambda scores: bits(scores).raw, "scores"),
        "disclosed": run("disclosed", disclosed, "scores", "y", "up", "order"),
        "units": run("units", units, "scores", "y", "up"),
        "weights": run("weights", weights, "scores", "y", "rows"),
        "shuffle": shuffle,
    }


def _real(raw: Any) -> Any:
    return as_real(raw).astype(jnp.float32)
