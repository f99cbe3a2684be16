"""Sparse decoding between the parties alone, by SPU's own operations: as `SecureDecoder`, with heads and neurons in secret orders.

The order of heads and of blocks of neurons is the product of two: the owner shares its weights in a random order of its own, and
the client's random permutation, a shared one-hot matrix, is multiplied on. So neither party can tell a block from its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import SystemRandom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..generation.secure import SecureDecoder
from ..models.cache import LayerCache, Window, cache_shape
from ..models.config import Params
from ..models.decoder import Decoder
from ..primitives.stock import as_real, as_ring
from ..progress import Progress, silent
from ..runtime import Program, Session, Slot
from .gate import above
from .prepared import LayerSparsity, LowRank
from .stock_sparse import StockPlan, dense_layer, fresh_layer, sparse_layer

SHUFFLE = "shuffle"
"""The phase that renewing orders is booked to."""
_ORDERS = ("order.client", "order.owner")
_OPENED = ("query", "key_value", "out", "up", "down", "second")
"""Parts that are static operands on SEMI2K."""


@dataclass(frozen=True)
class SparseNetwork:
    """A decoder's layers in heads and blocks of neurons; embedding, output table and final norm stay those of `decoder`.

    params: "layers" and "final".
    """

    decoder: Decoder
    plans: tuple[StockPlan, ...]
    params: Params

    def enter(self, x: jax.Array) -> jax.Array:
        """What the first layer takes, from what the embedding gives: the same."""
        return x

    def kind(self, i: int) -> int:
        """Layers of equal kinds run the same program."""
        return list(dict.fromkeys(self.plans)).index(self.plans[i])

    def layer(self, i: int) -> Callable:
        """Layer i as a function (see `sparse_layer`)."""
        return partial(sparse_layer, self.decoder.config, self.plans[i])

    def final(self, params: Params, x: jax.Array) -> jax.Array:
        """The last norm, as the decoder's."""
        return self.decoder.final(params, x)


def sparse_network(decoder: Decoder, sparsity: Sequence[LayerSparsity], dense: bool) -> SparseNetwork:
    """The decoder with the predictors of `sparsity`, a layer each; `dense` as in `StockPlan`."""
    following = [*sparsity[1:], None]
    plans = tuple(
        StockPlan(each.active_heads, each.active_blocks, after.active_heads if after and after.heads else None, dense)
        for each, after in zip(sparsity, following, strict=True)
    )
    layers = [
        _layer(decoder, params, each, after.heads if after else None, dense)
        for params, each, after in zip(decoder.params["layers"], sparsity, following, strict=True)
    ]
    return SparseNetwork(decoder, plans, {"layers": layers, "final": decoder.params["final"]})


class SparseSecureDecoder(SecureDecoder):
    """An OPT decoder that computes predicted heads and blocks of neurons, in new orders every `renew` tokens.

    What each party learns beyond `SecureDecoder`'s: in every layer, for every token, which blocks are active, and in passes of one
    token which heads, named by their places in the present secret order; how many is constant (docs/leakage.md).
    """

    def __init__(
        self, session: Session, network: SparseNetwork, capacity: int, prefix: Sequence[int] = (), renew: int | None = None
    ):
        super().__init__(session, network.decoder, capacity, prefix, network)  # type: ignore[arg-type]
        self._plans = network.plans
        self._renew = renew
        self._since = 0

    def advance(self, tokens: Sequence[int], last_only: bool = True) -> np.ndarray:
        self._count(len(tokens))
        return super().advance(tokens, last_only)

    def score(self, tokens: Sequence[int]) -> None:
        self._count(len(tokens))
        super().score(tokens)

    def renew(self, progress: Progress = silent) -> None:
        """Put heads and blocks of every layer into new secret orders."""
        self._since = 0
        with self.session.phase(SHUFFLE):
            work = [(i, kind) for i in range(len(self._plans)) for kind in ("heads", "neurons")]
            for i, kind in progress(work, "shuffling", "part"):
                self._shuffle(i, kind)

    def _count(self, tokens: int) -> None:
        """Renew the orders where these tokens would be more than they serve."""
        if self._renew is not None and self._since and self._since + tokens > self._renew:
            self.renew()
        self._since += tokens

    def _share_cache(self, progress: Progress) -> None:
        super()._share_cache(progress)
        self.renew(progress)

    def _shuffle(self, i: int, kind: str) -> None:
        names, slots = self._params["layers"][i][kind], self._slots["layers"][i][kind]
        size = self.decoder.config.heads if kind == "heads" else slots["up_bias"].shape[0]
        cache = self._cache[i] if kind == "heads" else None
        _share_orders(self.session, size)
        rows = None if cache is None else LayerCache(*(Slot(cache_shape(self.decoder.config, self.capacity)) for _ in range(2)))
        matrix = Slot((size, size), np.int64)
        program = self.session.compile(f"{SHUFFLE} {kind}", partial(_shuffled, size), (slots, rows, matrix, matrix))
        self.session.run(program, (names, cache, *_ORDERS), (names, cache))
        _keep_opened(self.session, names, slots)

    # Passes

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        every = np.broadcast_to(np.arange(self.decoder.config.heads), (n, self.decoder.config.heads))
        self.session.publish(_active(None), every.astype(np.int64))
        place = self._window(n)
        names = Window(*(f"window.{field}" for field in Window._fields))
        for name, value in zip(names, place, strict=True):
            self.session.publish(name, value)
        for i in order(range(len(self._cache))):
            kept, following = self._cache[i], self._following(self._params, i)
            active = _active(i if i and self._plans[i - 1].next_heads else None)
            results = ("x", kept, *([] if following is None else [_active(i + 1)]))
            arguments = (self._params["layers"][i], following, "x", kept, active, names)
            self.session.run(self._layer_program(n, place, i), arguments, results)

    def _following(self, tree: Params, i: int) -> Params | None:
        """The second product of the next layer's heads, where layer i predicts them; of the tree of names or of slots."""
        if self._plans[i].next_heads is None:
            return None
        heads = tree["layers"][i + 1]["heads"]
        return {name: heads[name] for name in ("second", "second_bias")}

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        config = self.decoder.config
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        active = Slot((n, self._plans[i].heads), np.int64, public=True)
        following = self._following({"layers": self._slots["layers"]}, i)
        slots = self._slots["layers"][i], following, Slot((n, config.width)), cache, active, public
        return self.session.compile(f"layer {self._network.kind(i)}", self._network.layer(i), slots)


class FreshSecureDecoder(SecureDecoder):
    """An OPT decoder that computes predicted blocks of neurons, in a fresh secret order for every token made one by one.

    Passes of several tokens are dense. What each party learns beyond `SecureDecoder`'s: nothing. The places of active blocks, which
    all see, are a uniform choice of a constant number (docs/leakage.md).
    """

    def __init__(self, session: Session, network: SparseNetwork, capacity: int, prefix: Sequence[int] = ()):
        super().__init__(session, network.decoder, capacity, prefix, network)  # type: ignore[arg-type]
        self._plans = network.plans

    def _share_cache(self, progress: Progress) -> None:
        super()._share_cache(progress)
        for names, slots in zip(self._params["layers"], self._slots["layers"], strict=True):
            for kind in ("heads", "neurons"):
                _keep_opened(self.session, names[kind], slots[kind])

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        place = self._window(n)
        names = Window(*(f"window.{field}" for field in Window._fields))
        for name, value in zip(names, place, strict=True):
            self.session.publish(name, value)
        for i in order(range(len(self._cache))):
            _share_orders(self.session, self._blocks(i))
            kept = self._cache[i]
            arguments = (self._params["layers"][i], *_ORDERS, "x", kept, names)
            self.session.run(self._layer_program(n, place, i), arguments, ("x", kept))

    def _blocks(self, i: int) -> int:
        return self._slots["layers"][i]["neurons"]["up_bias"].shape[0]

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        config, plan = self.decoder.config, self._plans[i]
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        matrix = Slot((self._blocks(i), self._blocks(i)), np.int64)
        slots = self._slots["layers"][i], matrix, matrix, Slot((n, config.width)), cache, public
        layer = fresh_layer if n == 1 else dense_layer
        return self.session.compile(f"layer {self._network.kind(i)}", partial(layer, config, plan), slots)


def _share_orders(session: Session, size: int) -> None:
    """A random permutation of each party as a shared one-hot matrix."""
    for name, role in zip(_ORDERS, ("client", "owner"), strict=True):
        session.share(name, np.eye(size, dtype=np.int64)[SystemRandom().sample(range(size), size)], role)


def _keep_opened(session: Session, names: Params, slots: Params) -> None:
    """Open those of a layer's parts that are static operands."""
    for name in _OPENED:
        if name in names:
            session.keep_opened(names[name], slots[name])


def all_heads(sparsity: Sequence[LayerSparsity]) -> list[LayerSparsity]:
    """The same with no head skipped."""
    return [replace(each, heads=None, active_heads=sparsity[0].active_heads) for each in sparsity]


def _active(layer: int | None) -> str:
    """The public variable with the numbers of a layer's active heads; of all heads where none are predicted."""
    return "active.all" if layer is None else f"active.{layer}"


def _shuffled(size: int, parts: Params, cache: LayerCache | None, client: Any, owner: Any) -> tuple[Params, LayerCache | None]:
    """Every part, and the cache's heads, in the order of both parties' permutations."""
    order = client @ owner

    def moved(x: Any, axis: int) -> Any:
        lead = x.shape[:axis]
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        raw = jnp.moveaxis((x if whole else as_ring(x)).reshape(*lead, size, -1), axis, 0)
        rows = jnp.moveaxis((order @ raw.reshape(size, -1)).reshape(raw.shape), 0, axis).reshape(x.shape)
        return rows if whole else as_real(rows).astype(x.dtype)

    found = {name: moved(x, _axis(name, x)) for name, x in parts.items()}
    return found, None if cache is None else LayerCache(*(moved(x, 1) for x in cache))


def _axis(name: str, x: Any) -> int:
    """Where a part's blocks are: behind the inputs of dense kernels that make outputs in blocks, else in front."""
    return int(name == "second" or (x.ndim == 2 and name in ("query", "key_value", "up")))


def _layer(decoder: Decoder, params: Params, sparsity: LayerSparsity, following: LowRank | None, dense: bool) -> Params:
    """A layer's parameters as `sparse_layer` takes them, in the owner's order."""
    config = decoder.config
    heads, width, blocks = config.heads, config.head_width, sparsity.blocks
    size = config.ffn // blocks
    predictors = [sparsity.neurons, *([] if following is None else [following])]
    q, k, v = (part.reshape(-1, heads, width) for part in np.split(params["qkv"]["kernel"], 3, axis=1))
    q_bias, k_bias, v_bias = (part.reshape(heads, width) for part in np.split(params["qkv"]["bias"], 3))
    up = params["up"]["kernel"][:, sparsity.order].reshape(-1, blocks, size)

    def outputs(kernel: np.ndarray) -> np.ndarray:
        """kernel [in, blocks, size]"""
        return kernel.reshape(len(kernel), -1) if dense else kernel.transpose(1, 2, 0)

    def inputs(kernel: np.ndarray, count: int) -> np.ndarray:
        """kernel [blocks * size, out]"""
        return kernel if dense else kernel.reshape(count, -1, kernel.shape[-1])

    return {
        "attention_norm": params["attention_norm"],
        "ffn_norm": params["ffn_norm"],
        "first": {
            "kernel": np.concatenate([each.first for each in predictors], axis=1),
            "bias": np.concatenate([each.first_bias for each in predictors]),
        },
        "heads": {
            "query": outputs(q),
            "key_value": outputs(np.concatenate([k, v], axis=2)),
            "out": inputs(params["out"]["kernel"], heads),
            "query_bias": q_bias,
            "key_value_bias": np.concatenate([k_bias, v_bias], axis=1),
            **({} if sparsity.heads is None else _second(sparsity.heads)),
        },
        "neurons": {
            "up": outputs(up),
            "down": inputs(params["down"]["kernel"][sparsity.order], blocks),
            "up_bias": params["up"]["bias"][sparsity.order].reshape(blocks, size),
            "order": np.eye(blocks, dtype=np.int64),
        },
        "second": {"kernel": sparsity.neurons.second, "bias": above(sparsity).second_bias},
        "out_bias": params["out"]["bias"],
        "down_bias": params["down"]["bias"],
    }


def _second(predictor: LowRank) -> Params:
    return {"second": predictor.second, "second_bias": predictor.second_bias}
