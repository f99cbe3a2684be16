"""A decoder for stock SPU in heads and blocks of neurons, with its predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from ..models.config import Params
from ..models.decoder import Decoder
from ..runtime import ProtocolConfig
from .gate import above
from .joint_sparse import joint_layer
from .prepared import LayerSparsity, LowRank
from .stock_sparse import StockPlan, sparse_layer


@dataclass(frozen=True)
class SparseNetwork:
    """A decoder's layers in heads and blocks of neurons; embedding, output table and final norm stay those of `decoder`.

    params: "layers" and "final". computed: what a layer computes; the first arguments are configuration and plan.
    """

    decoder: Decoder
    plans: tuple[StockPlan, ...]
    params: Params
    computed: Callable = sparse_layer

    def enter(self, x: jax.Array) -> jax.Array:
        """What the first layer takes, from what the embedding gives: the same."""
        return x

    def kind(self, i: int) -> int:
        """Layers of equal kinds run the same program."""
        return list(dict.fromkeys(self.plans)).index(self.plans[i])

    def layer(self, i: int) -> Callable:
        """Layer i as a function (see `sparse_layer`)."""
        return partial(self.computed, self.decoder.config, self.plans[i])

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


def joint_network(decoder: Decoder, sparsity: Sequence[LayerSparsity]) -> SparseNetwork:
    """The same for `joint_layer`, which skips no heads."""
    plans = tuple(StockPlan(decoder.config.heads, each.active_blocks, None, dense=False) for each in sparsity)
    layers = [_joint(*parts) for parts in zip(decoder.params["layers"], sparsity, strict=True)]
    return SparseNetwork(decoder, plans, {"layers": layers, "final": decoder.params["final"]}, joint_layer)


def network_for(protocol: ProtocolConfig, decoder: Decoder, sparsity: Sequence[LayerSparsity]) -> SparseNetwork:
    """The network that costs a protocol least: with dense products where they cost by their inputs."""
    if protocol.ciphertexts:
        return joint_network(decoder, sparsity)
    return sparse_network(decoder, sparsity, dense=protocol.name == "SEMI2K")


def all_heads(sparsity: Sequence[LayerSparsity]) -> tuple[LayerSparsity, ...]:
    """The same with no head skipped."""
    return tuple(replace(each, heads=None, active_heads=sparsity[0].active_heads) for each in sparsity)


def _layer(decoder: Decoder, params: Params, sparsity: LayerSparsity, following: LowRank | None, dense: bool) -> Params:
    """A layer's parameters as `sparse_layer` takes them, in the owner's order."""
    config = decoder.config
    heads, width = config.heads, config.head_width
    predictors = [sparsity.neurons, *([] if following is None else [following])]
    q, k, v = (part.reshape(-1, heads, width) for part in np.split(params["qkv"]["kernel"], 3, axis=1))
    q_bias, k_bias, v_bias = (part.reshape(heads, width) for part in np.split(params["qkv"]["bias"], 3))
    outputs, inputs = partial(_outputs, dense), partial(_inputs, dense)
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
            "out": inputs(heads, params["out"]["kernel"]),
            "query_bias": q_bias,
            "key_value_bias": np.concatenate([k_bias, v_bias], axis=1),
            **({} if sparsity.heads is None else _second(sparsity.heads)),
        },
        "neurons": _neurons(params, sparsity, dense),
        "second": {"kernel": sparsity.neurons.second, "bias": above(sparsity).second_bias},
        "out_bias": params["out"]["bias"],
        "down_bias": params["down"]["bias"],
    }


def _joint(params: Params, sparsity: LayerSparsity) -> Params:
    """A layer's parameters as `joint_layer` takes them: a product with the predictor's two matrices is one with their product."""
    first, first_bias, second, second_bias = (np.asarray(part, np.float64) for part in above(sparsity))
    qkv = params["qkv"]
    return {
        **params,
        "qkv": {
            "kernel": np.concatenate([qkv["kernel"], first @ second], axis=1, dtype=np.float32),
            "bias": np.concatenate([qkv["bias"], first_bias @ second + second_bias], dtype=np.float32),
        },
        "neurons": _neurons(params, sparsity, dense=False),
    }


def _neurons(params: Params, sparsity: LayerSparsity, dense: bool) -> Params:
    blocks, up, down = sparsity.blocks, params["up"], params["down"]
    return {
        "up": _outputs(dense, up["kernel"][:, sparsity.order].reshape(len(up["kernel"]), blocks, -1)),
        "down": _inputs(dense, blocks, down["kernel"][sparsity.order]),
        "up_bias": up["bias"][sparsity.order].reshape(blocks, -1),
        "order": np.eye(blocks, dtype=np.int64),
    }


def _outputs(dense: bool, kernel: np.ndarray) -> np.ndarray:
    """kernel [in, blocks, size]"""
    return kernel.reshape(len(kernel), -1) if dense else kernel.transpose(1, 2, 0)


def _inputs(dense: bool, blocks: int, kernel: np.ndarray) -> np.ndarray:
    """kernel [blocks * size, out]"""
    return kernel if dense else kernel.reshape(blocks, -1, kernel.shape[-1])


def _second(predictor: LowRank) -> Params:
    return {"second": predictor.second, "second_bias": predictor.second_bias}
