"""A layer and its parts on SPU's own operations, dense and sparse, each a program of its own.

The products alone are the layer without its norms, softmax and ReLU, which give what they are given; values mean nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..comet.activity import dense, normed
from ..comet.joint_sparse import joint_attention, joint_ffn
from ..comet.network import network_for
from ..comet.orders import keep_opened
from ..comet.stock_sparse import StockPlan, sparse_attention, sparse_ffn
from ..models.cache import LayerCache, Window, cache_shape, window
from ..models.config import DecoderConfig, Params
from ..models.decoder import path_name
from ..models.layers import softmax
from ..runtime import Session, Slot
from .sparse_case import LayerCase

Runs = dict[str, Callable[[], None]]
Pair = tuple[Any, Any]
"""An argument of a program: the tree of its names, and that of its slots."""


class Functions(NamedTuple):
    """What a layer has beside products."""

    norm: Callable
    softmax: Callable
    relu: Callable


_REAL = Functions(normed, softmax, jax.nn.relu)
_LEFT_OUT = Functions(lambda config, params, x: x, lambda scores, mask: scores, lambda h: h)


def stock_runs(session: Session, case: LayerCase, sparse: bool, products: bool = True) -> Runs:
    """A run for each part of the layer, its weights shared and, where it can be, opened; each leaves its output in a variable of
    its name.

    products: whether the halves' products alone are among the parts. Orders are the owner's: a secret one costs a pass no more.
    """
    ends = {"": _REAL} | ({"_linear": _LEFT_OUT} if products else {})
    kind = _Dense if not sparse else _Joint if session.protocol.ciphertexts else _Sparse
    return kind(session, case).runs(ends)


class _Placed:
    """One layer's inputs in a session."""

    def __init__(self, session: Session, case: LayerCase):
        config, n, capacity = case.config, case.tokens, case.context + case.tokens
        self.session, self.case, self.config = session, case, config
        session.share("x", case.x, "client")
        for name, rows in zip(LayerCache._fields, case.cache, strict=True):
            session.share(name, np.pad(rows, [(0, n), (0, 0), (0, 0)]), "owner")
        place = window(config, case.context, n, capacity)
        for name, value in zip(Window._fields, place, strict=True):
            session.publish(name, value)
        rows_slot = Slot(cache_shape(config, capacity))
        self.x: Pair = "x", Slot(case.x.shape)
        self.cache: Pair = LayerCache(*LayerCache._fields), LayerCache(rows_slot, rows_slot)
        self.place: Pair = (
            Window(*Window._fields),
            Window(*(Slot(value.shape, value.dtype, public=True) for value in place)),
        )

    def shared(self, name: str, tree: Params) -> Pair:
        """Share parameters; kernels become static operands where the protocol has these."""

        def share(path: tuple, value: np.ndarray) -> str:
            variable = f"{name}.{path_name(path)}"
            share = self.session.share_operand if variable.endswith(".kernel") else self.session.share
            share(variable, value, "owner")
            return variable

        names = jax.tree_util.tree_map_with_path(share, tree)
        return names, jax.tree_util.tree_map(lambda value: Slot(value.shape, value.dtype), tree)

    def public(self, name: str, value: np.ndarray) -> Pair:
        self.session.publish(name, value)
        return name, Slot(value.shape, value.dtype, public=True)

    def first_half(self, name: str, function: Callable, *arguments: Pair, more: Sequence[str] = ()) -> Callable[[], None]:
        """The run of a function that gives x and the cache, and values named `more`."""
        cache = LayerCache(*(f"{name}.{part}" for part in LayerCache._fields))
        return self.run(name, function, arguments, (name, cache, *more))

    def run(self, name: str, function: Callable, arguments: Sequence[Pair], results: Any) -> Callable[[], None]:
        names, slots = zip(*arguments, strict=True)
        program = self.session.compile(name, function, slots)
        return partial(self.session.run, program, names, results)


class _Dense(_Placed):
    """A layer of models/opt.py."""

    def runs(self, ends: Mapping[str, Functions]) -> Runs:
        weights = self.shared("dense", self.case.decoder.params["layers"][0])
        attention, ffn = _only(weights, "attention_norm", "qkv", "out"), _only(weights, "ffn_norm", "up", "down")
        before = self.x, self.cache, self.place
        found = {"layer": self.first_half("layer", self.case.decoder.block, weights, *before)}
        for end, functions in ends.items():
            halves = partial(dense_attention, self.config, functions), partial(dense_ffn, self.config, functions)
            found[f"attention{end}"] = self.first_half(f"attention{end}", halves[0], attention, *before)
            found[f"ffn{end}"] = self.run(f"ffn{end}", halves[1], (ffn, self.x), f"ffn{end}")
        return found


class _Sparse(_Placed):
    """A layer of comet/stock_sparse.py; products are dense where weights are opened once."""

    def runs(self, ends: Mapping[str, Functions]) -> Runs:
        case = self.case
        network = network_for(self.session.protocol, case.decoder, case.sparsity)
        plan, layers = network.plans[0], network.params["layers"]
        weights, following = self.shared("sparse", layers[0]), None
        if plan.next_heads is not None:
            following = self.shared("next", {name: layers[1]["heads"][name] for name in ("second", "second_bias")})
            keep_opened(self.session, *following)
        for kind in ("heads", "neurons"):
            keep_opened(self.session, *(each[kind] for each in weights))
        attention = _only(weights, "attention_norm", "heads", "out_bias")
        ffn = _only(weights, "ffn_norm", "neurons", "down_bias")
        before = self.x, self.cache, self.public("active", case.active), self.place
        index = self.public("index", case.index)
        more = [] if following is None else ["next"]
        found = {
            "layer": self.first_half("layer", network.layer(0), weights, following or (None, None), *before, more=more),
            "given": self.first_half("given", partial(_given_layer, self.config, plan), weights, index, *before),
        }
        for end, functions in ends.items():
            halves = partial(_attention, self.config, plan, functions), partial(_ffn, self.config, plan, functions)
            found[f"attention{end}"] = self.first_half(f"attention{end}", halves[0], attention, *before)
            found[f"ffn{end}"] = self.run(f"ffn{end}", halves[1], (ffn, self.x, index), f"ffn{end}")
        return found


class _Joint(_Placed):
    """A layer of comet/joint_sparse.py."""

    def runs(self, ends: Mapping[str, Functions]) -> Runs:
        network = network_for(self.session.protocol, self.case.decoder, self.case.sparsity)
        plan, weights = network.plans[0], self.shared("sparse", network.params["layers"][0])
        attention, ffn = _only(weights, "attention_norm", "qkv", "out"), _only(weights, "ffn_norm", "up", "down", "neurons")
        before, active, index = (self.x, self.cache), self.public("active", self.case.active), self.public("index", self.case.index)
        found = {
            "layer": self.first_half("layer", network.layer(0), weights, (None, None), *before, active, self.place),
            "given": self.first_half("given", partial(_given_joint, self.config, plan), weights, index, *before, self.place),
        }
        for end, functions in ends.items():
            halves = partial(_joint_attention, self.config, functions), partial(_joint_ffn, self.config, plan, functions)
            found[f"attention{end}"] = self.first_half(f"attention{end}", halves[0], attention, *before, self.place)
            found[f"ffn{end}"] = self.run(f"ffn{end}", halves[1], (ffn, self.x, index), f"ffn{end}")
        return found


def _only(weights: Pair, *names: str) -> Pair:
    """The parameters that a part takes."""
    found = ({name: each[name] for name in names} for each in weights)
    return tuple(found)  # type: ignore[return-value]


# Halves of a dense layer, as in models/gpt2.py


def dense_attention(
    config: DecoderConfig, functions: Functions, params: Params, x: Any, cache: LayerCache, place: Window
) -> tuple[Any, LayerCache]:
    """x after the first half, and the cache."""
    y = functions.norm(config, params["attention_norm"], x)
    q, k, v = (part.reshape(len(x), config.heads, -1) for part in jnp.split(dense(params["qkv"], y), 3, axis=-1))
    origin = (place.start, jnp.int32(0), jnp.int32(0))
    cache = LayerCache(jax.lax.dynamic_update_slice(cache.keys, k, origin), jax.lax.dynamic_update_slice(cache.values, v, origin))
    length = place.mask.shape[1]
    scores = (q * config.head_width**-0.5).transpose(1, 0, 2) @ cache.keys[:length].transpose(1, 2, 0)
    mixed = functions.softmax(scores, place.mask) @ cache.values[:length].transpose(1, 0, 2)
    return x + dense(params["out"], mixed.transpose(1, 0, 2).reshape(x.shape)), cache


def dense_ffn(config: DecoderConfig, functions: Functions, params: Params, x: Any) -> Any:
    """x after the second half."""
    h = functions.relu(dense(params["up"], functions.norm(config, params["ffn_norm"], x)))
    return x + dense(params["down"], h)


# Halves of a sparse layer whose heads and blocks are given


def _given_layer(
    config: DecoderConfig, plan: StockPlan, params: Params, index: Any, x: Any, cache: LayerCache, active: Any, place: Window
) -> tuple[Any, LayerCache]:
    x, cache = _attention(config, plan, _REAL, params, x, cache, active, place)
    return _ffn(config, plan, _REAL, params, x, index), cache


def _attention(
    config: DecoderConfig,
    plan: StockPlan,
    functions: Functions,
    params: Params,
    x: Any,
    cache: LayerCache,
    active: Any,
    place: Window,
) -> tuple[Any, LayerCache]:
    y = functions.norm(config, params["attention_norm"], x)
    mixed, cache = sparse_attention(config, plan, params["heads"], y, cache, active, place, functions.softmax)
    return x + mixed + params["out_bias"], cache


def _ffn(config: DecoderConfig, plan: StockPlan, functions: Functions, params: Params, x: Any, index: Any) -> Any:
    y = functions.norm(config, params["ffn_norm"], x)
    return x + sparse_ffn(plan, params["neurons"], y, index, functions.relu) + params["down_bias"]


def _given_joint(
    config: DecoderConfig, plan: StockPlan, params: Params, index: Any, x: Any, cache: LayerCache, place: Window
) -> tuple[Any, LayerCache]:
    x, cache = _joint_attention(config, _REAL, params, x, cache, place)
    return _joint_ffn(config, plan, _REAL, params, x, index), cache


def _joint_attention(
    config: DecoderConfig, functions: Functions, params: Params, x: Any, cache: LayerCache, place: Window
) -> tuple[Any, LayerCache]:
    y = functions.norm(config, params["attention_norm"], x)
    mixed, cache, _ = joint_attention(config, params, y, cache, place, functions.softmax)
    return x + mixed, cache


def _joint_ffn(config: DecoderConfig, plan: StockPlan, functions: Functions, params: Params, x: Any, index: Any) -> Any:
    return x + joint_ffn(plan, params, functions.norm(config, params["ffn_norm"], x), index, functions.relu)
