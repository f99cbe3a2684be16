"""A layer and its parts on the plugin's protocols, dense and sparse, each a program of its own.

The products alone are the layer without its norms, softmax and ReLU: operands are opened, truncated before the next product, and
multiplied as in the layer, and values mean nothing. An opening that a function shares with a product is the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ..comet.assisted import SparseAssistedDecoder
from ..comet.fixed_sparse import SparseParams, SparsePlan, sparse_attention, sparse_block, sparse_ffn
from ..errors import UserError
from ..generation.assisted import AssistedDecoder
from ..models.config import DecoderConfig
from ..models.decoder import Decoder, path_name
from ..models.fixed_block import BITS, STREAM_BITS, Angles, BlockParams, BlockPlan, add_product, biased, block, split_heads
from ..models.plan import plan_model
from ..primitives.active import active_contract
from ..primitives.attention import Place, RowCache, attend
from ..primitives.compare import relu
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, encode
from ..primitives.norm import norm_dot
from ..primitives.rows import append, first_rows
from ..primitives.truncate import truncate
from ..progress import silent
from ..runtime import Session, Slot
from ..runtime.assisted import OperandName
from .sparse_case import LayerCase, SparseModel

Runs = dict[str, Callable[[], None]]
Pair = tuple[Any, Any]
"""An argument of a program: the tree of its names, and that of its slots."""


def plugin_runs(session: Session, model: SparseModel, case: LayerCase, sparse: bool, products: bool = True) -> Runs:
    """A run for each part of the layer, its weights masked and opened; each leaves its output in a variable of its name.

    products: whether the halves' products alone are among the parts.

    Raises UserError where the plugin cannot run it.
    """
    protocol, calibration = session.protocol, model.calibration
    if (protocol.name, protocol.ring) != ("SEMI2K", "FM64"):
        raise UserError(f"ops plugin: runs on SEMI2K in FM64, not on {protocol.name} in {protocol.ring}; name SEMI2K, or ops stock")
    if calibration is None:
        raise UserError("ops plugin: needs the model's calibration; give one, or use ops stock")
    count = len(case.sparsity) if sparse else 1
    own = slice(case.layer, case.layer + count)
    decoder = Decoder(replace(case.config, layers=count), {**case.decoder.params, "layers": case.decoder.params["layers"][:count]})
    measured = replace(calibration, layers=calibration.layers[own], references=calibration.references[own], sizes=None)
    capacity, prefix = case.context + case.tokens, [0] * case.context  # the rows are given, whatever the tokens
    arguments: Any = session, decoder, measured, capacity, prefix, None, None, [case.cache] * count
    placed: _Dense | _Sparse = _Sparse(*arguments, sparsity=case.sparsity) if sparse else _Dense(*arguments)
    whole = plan_model(model.decoder.config, calibration)  # a layer's tables are those that it has among all layers
    placed.plan = replace(whole, blocks=whole.blocks[own], phis=whole.phis[own])
    placed.put(case)
    return placed.runs(case) | (placed.products(case) if products else {})


def plugin_output(session: Session, name: str) -> np.ndarray:
    """The stream [n, width] that a run left, less its mean."""
    return session.receive(name) / 2.0**STREAM_BITS


class _Placed(AssistedDecoder):
    """One layer's weights, cache rows and input in place. Orders are the owner's: a secret one costs a pass nothing more."""

    def put(self, case: LayerCase) -> None:
        self._mask_layers(silent)
        self._mask_cache(silent)
        centred = case.x - case.x.mean(-1, keepdims=True)
        self.session.share("x", encode(centred, STREAM_BITS), "client")
        x, cache, where = self._layer_inputs(case.tokens)
        values = self._where(case.tokens)
        names = jax.tree_util.tree_map_with_path(lambda path, _: "window." + path_name(path), values)
        for name, value in zip(*map(jax.tree_util.tree_leaves, (names, values)), strict=True):
            self.session.publish(name, value)
        self._x: Pair = "x", x
        self._rows: Pair = self._cache[0], cache
        self._places: list[Pair] = list(zip(names, where, strict=True))
        self._weights: Pair = self._layers[0], self._layer_slots[self._kinds[0]]

    def _public(self, name: str, value: np.ndarray) -> Pair:
        self.session.publish(name, value)
        return name, Slot(value.shape, np.int64, public=True)

    def _first_half(self, name: str, function: Callable, *arguments: Pair, more: Sequence[str] = ()) -> Callable[[], None]:
        """The run of a function that gives x and the cache, and plain values named `more`."""
        kept = [OperandName(f"{name}.{part}") for part in RowCache._fields]
        keeps = (None, *(part.raw for part in self._rows[1]), *[None] * len(more))
        return self._run(name, function, arguments, keeps, [name, *kept, *more])

    def _second_half(self, name: str, function: Callable, *arguments: Pair) -> Callable[[], None]:
        """The run of a function that gives x."""
        return self._run(name, function, arguments, (None,), [name])

    def _run(self, name: str, function: Callable, arguments: Sequence[Pair], keeps: tuple, results: list) -> Callable[[], None]:
        names, slots = zip(*arguments, strict=True)
        program = self.assisted.compile(name, function, slots, keeps)
        return partial(self.assisted.run, program, names, results, {"start": self.rows.written})


class _Dense(_Placed):
    """A layer of fixed_block.py."""

    def runs(self, case: LayerCase) -> Runs:
        config, tables, weights = self.decoder.config, self._kinds[0], self._weights
        attention, ffn = self._halves()
        before = self._x, self._rows, *self._places
        return {
            "layer": self._first_half("layer", partial(block, config, tables), weights, *before),
            "attention": self._first_half("attention", partial(dense_attention, config, tables), attention, *before),
            "ffn": self._second_half("ffn", partial(dense_ffn, tables), ffn, self._x),
        }

    def products(self, case: LayerCase) -> Runs:
        config, tables = self.decoder.config, self._kinds[0]
        attention, ffn = self._halves()
        name, products = "attention_linear", partial(_dense_attention_products, config, tables)
        return {
            name: self._first_half(name, products, attention, self._x, self._rows, *self._places),
            "ffn_linear": self._second_half("ffn_linear", partial(_dense_ffn_products, tables), ffn, self._x),
        }

    def _halves(self) -> tuple[Pair, Pair]:
        return (
            _only(self._weights, "qkv", "out", "attention_phi", "qkv_bias", "out_bias", "slopes"),
            _only(self._weights, "up", "down", "ffn_phi", "up_bias", "down_bias"),
        )


class _Sparse(_Placed, SparseAssistedDecoder):
    """A layer of fixed_sparse.py."""

    def runs(self, case: LayerCase) -> Runs:
        config, plan, weights = self.decoder.config, self._kinds[0], self._weights
        index, before = self._inputs(case)
        given, (attention, ffn) = _given(weights), self._halves()
        following: Pair = self._following(0, slots=False), self._following(0, slots=True)
        more = [] if following[0] is None else ["next"]
        return {
            "layer": self._first_half("layer", partial(sparse_block, config, plan), weights, following, *before, more=more),
            "given": self._first_half("given", partial(_given_block, plan), given, index, *before),
            "attention": self._first_half("attention", _no_scores(partial(sparse_attention, plan)), attention, *before),
            "ffn": self._second_half("ffn", partial(sparse_ffn, plan), ffn, self._x, index),
        }

    def products(self, case: LayerCase) -> Runs:
        index, before = self._inputs(case)
        attention, ffn = self._halves()
        halves = partial(_sparse_attention_products, self._kinds[0]), partial(_sparse_ffn_products, self._kinds[0])
        return {
            "attention_linear": self._first_half("attention_linear", halves[0], attention, *before),
            "ffn_linear": self._second_half("ffn_linear", halves[1], ffn, self._x, index),
        }

    def _inputs(self, case: LayerCase) -> tuple[Pair, list[Pair]]:
        """The active blocks; and what the first half takes beside its weights."""
        active = self._public("active", case.active)
        return self._public("index", case.index), [self._x, self._rows, active, *self._places]

    def _halves(self) -> tuple[Pair, Pair]:
        given = _given(self._weights)
        return _only(given, "heads", "attention_phi", "out_bias"), _only(given, "neurons", "ffn_phi", "down_bias")


def _only(weights: Pair, *fields: str) -> Pair:
    """The parameters that a part takes; None in place of the others."""
    names, slots = (each._replace(**{name: None for name in each._fields if name not in fields}) for each in weights)
    return names, slots


def _given(weights: Pair) -> Pair:
    """A sparse layer's parameters without its predictors."""
    names, slots = weights
    heads = _only((names.heads, slots.heads), "query", "key_value", "out", "query_bias", "key_value_bias", "slopes")
    neurons = _only((names.neurons, slots.neurons), "up", "down", "up_bias")
    kept = _only(weights, "attention_phi", "ffn_phi", "out_bias", "down_bias")
    found = (each._replace(heads=h, neurons=n) for each, h, n in zip(kept, heads, neurons, strict=True))
    return tuple(found)


# Halves of a dense layer, as in fixed_block.py


def dense_attention(
    config: DecoderConfig, plan: BlockPlan, params: BlockParams, x: Fixed, cache: RowCache, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    """x after the first half, and the cache."""
    h = biased(norm_dot(x, params.qkv, plan.norm, params.attention_phi), params.qkv_bias)
    q, k, v, reference = split_heads(config, h, params.slopes, angles)
    mixed, cache = attend(q, k, v, cache, place, plan.softmax, reference)
    return add_product(x, mixed.reshape(x.shape[0], -1), params.out, params.out_bias), cache


def dense_ffn(plan: BlockPlan, params: BlockParams, x: Fixed) -> Fixed:
    """x after the second half."""
    h = biased(norm_dot(x, params.up, plan.norm, params.ffn_phi), params.up_bias)
    return add_product(x, relu(h), params.down, params.down_bias)


# A sparse layer whose heads and blocks are given


def _given_block(
    plan: SparsePlan, params: SparseParams, index: Any, x: Fixed, cache: RowCache, active: Any, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    x, cache, _ = sparse_attention(plan, params, x, cache, active, place, angles)
    return sparse_ffn(plan, params, x, index), cache


def _no_scores(attention: Callable) -> Callable:
    return lambda *args: attention(*args)[:2]


# Products alone


def _whole(x: Fixed, bits: int = STREAM_BITS) -> Fixed:
    """What would come back to the whole ring in between, as it is."""
    return Fixed(x.raw, bits)


def _dense_attention_products(
    config: DecoderConfig, plan: BlockPlan, params: BlockParams, x: Fixed, cache: RowCache, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    h = _whole(contract("nk,km->nm", x, params.qkv, plan.norm.activation_bits))
    q, k, v, _ = split_heads(config, h, None, angles)
    cache, keys, values = _written(cache, k, v, place)
    weights = _whole(contract("ngqd,tgd->gqnt", q, keys, BITS))
    mixed = _whole(contract("gqnt,tgd->gqnd", weights, values, BITS))
    mixed = mixed.with_raw(mixed.raw.transpose(2, 0, 1, 3)).reshape(x.shape[0], -1)
    return add_product(x, mixed, params.out, params.out_bias), cache


def _dense_ffn_products(plan: BlockPlan, params: BlockParams, x: Fixed) -> Fixed:
    h = _whole(contract("nk,km->nm", x, params.up, plan.norm.activation_bits))
    return add_product(x, h, params.down, params.down_bias)


def _sparse_attention_products(
    plan: SparsePlan, params: SparseParams, x: Fixed, cache: RowCache, active: Any, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    heads, bits, width = params.heads, plan.tables.norm.activation_bits, cache.keys.shape[-1]
    rows = _whole(contract("nd,bsd->nbs", x, heads.key_value, bits))
    q = _whole(active_contract("nd,bsd->nbs", x, heads.query, active, bits))[..., :width]
    cache, keys, values = _written(cache, rows[..., :width], rows[..., width:], place)
    weights = _whole(active_contract("nbd,tbd->nbt", q, keys, active, BITS))
    mixed = _whole(active_contract("nbt,tbd->nbd", weights, values, active, BITS))
    return biased(x + active_contract("nbs,dbs->nd", truncate(mixed, BITS), heads.out, active), params.out_bias), cache


def _sparse_ffn_products(plan: SparsePlan, params: SparseParams, x: Fixed, index: Any) -> Fixed:
    h = _whole(active_contract("nd,bsd->nbs", x, params.neurons.up, index, plan.tables.norm.activation_bits))
    return biased(x + active_contract("nbs,dbs->nd", truncate(h, BITS), params.neurons.down, index), params.down_bias)


def _written(cache: RowCache, k: Fixed, v: Fixed, place: Place) -> tuple[RowCache, Fixed, Fixed]:
    """The cache with new rows, and of these and those before the keys and values that are looked at."""
    cache = RowCache(append(cache.keys, k, place.start), append(cache.values, v, place.start))
    length = place.mask.shape[1]
    return cache, first_rows(cache.keys, length), first_rows(cache.values, length)
