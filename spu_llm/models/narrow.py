"""A decoder made ready for narrowed functions: plans from ranges on text, weights folded for them.

All of it is the owner's work in plaintext. The scales of the norms (SOAL's phi) are secret: they stand in weights and in one secret
number a norm. What is public is the plan: which chains, how many comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..primitives.narrow.activation import ActivationPlan, activation_plan
from ..primitives.narrow.chain import Chain
from ..primitives.narrow.inverse_root import inverse_root_plan
from ..primitives.narrow.pieces import Pieces, last_weights
from ..primitives.narrow.softmax import SoftmaxPlan, softmax_plan
from .calibration import Calibration, LayerRanges, place_features
from .config import DecoderConfig, Params
from .decoder import Decoder
from .folded import FoldedLayer, fold_layer
from .narrow_block import PHI_BITS, Dense, LayerParams, LayerPlan, NormParams, block, norm

Range = tuple[float, float]

_MARGIN = 2.0  # how far beyond what was seen, at both ends, mean squares and sums may go
_SCORE_MARGIN = 1.25
_ACTIVATION_MARGIN = 1.3
_ACTIVATION = {"gpt2": "gelu_tanh", "llama": "silu", "mixtral": "silu"}
_REMEDY = "give the model a prefix that takes its outliers (prefix in the model's config)"


@dataclass(frozen=True)
class NarrowPlan:
    """Each layer's functions, of at most four kinds, so that few programs are compiled; the final norm's inverse root."""

    layers: tuple[LayerPlan, ...]
    final: Chain | Pieces


def plan_narrow(config: DecoderConfig, calibration: Calibration, capacity: int, prefix: int = 0) -> NarrowPlan:
    """Plans for the ranges of a calibration made after `prefix` tokens. Raises UserError where a range exceeds every plan."""
    layers = calibration.layers
    squares = [max(_ratio(layer.attention_squares), _ratio(layer.ffn_squares)) for layer in layers]
    norms = _two_kinds([_norm(f"layer {i}, norms", ratio) for i, ratio in enumerate(squares)])
    activations = _two_kinds([_activation(config, f"layer {i}", layer.activation) for i, layer in enumerate(layers)])
    softmax = _softmax(layers, capacity)
    leading = prefix + 1 if calibration.reference == "maxima" else 0
    routing = _routing(config, layers)
    plans = tuple(LayerPlan(n, softmax, a, leading, routing) for n, a in zip(norms, activations, strict=True))
    return NarrowPlan(plans, _norm("final norm", _ratio(calibration.final_squares)))


def _ratio(squares: Range) -> float:
    return squares[1] / squares[0] * _MARGIN**2


def _norm(where: str, ratio: float) -> Chain | Pieces:
    try:
        return inverse_root_plan(ratio)
    except ValueError as error:
        raise UserError(f"{where}: mean squares on the calibration text: {error}; {_REMEDY}") from None


def _activation(config: DecoderConfig, where: str, seen: Range) -> ActivationPlan | None:
    if config.family not in _ACTIVATION:
        return None
    try:
        return activation_plan(_ACTIVATION[config.family], max(-seen[0], seen[1]) * _ACTIVATION_MARGIN)
    except ValueError as error:
        raise UserError(f"{where}: inputs on the calibration text: {error}; {_REMEDY}") from None


def _softmax(layers: tuple[LayerRanges, ...], length: int) -> SoftmaxPlan:
    relative = min(layer.relative[0] for layer in layers), max(layer.relative[1] for layer in layers)
    log_sum = min(layer.log_sum[0] for layer in layers), max(layer.log_sum[1] for layer in layers)
    margin = float(np.log(_MARGIN))
    try:
        wide = relative[0] * _SCORE_MARGIN, relative[1] * _SCORE_MARGIN
        return softmax_plan(wide, (log_sum[0] - margin, log_sum[1] + margin), length)
    except ValueError as error:
        raise UserError(f"scores less their reference on the calibration text: {error}; {_REMEDY}") from None


def _routing(config: DecoderConfig, layers: tuple[LayerRanges, ...]) -> SoftmaxPlan | None:
    """The largest of some logits whose mean is 0 is not below 0, so the sum of exponentials is not below 1."""
    if config.experts is None or config.experts_per_token is None:
        return None
    low = min(layer.router[0] for layer in layers) * _SCORE_MARGIN
    high = max(layer.router[1] for layer in layers) * _SCORE_MARGIN
    try:
        return softmax_plan((low, high), (0.0, high + float(np.log(config.experts_per_token))), config.experts)
    except ValueError as error:
        raise UserError(f"experts' logits on the calibration text: {error}; use a model with smaller router weights") from None


def _two_kinds(plans: list[Any]) -> list[Any]:
    """The plans, all but one kind of them replaced by the widest: the one that saves most messages so."""
    widest = max(plans, key=_reach)

    def saved(plan: Any) -> int:
        return sum(_work(widest) - _work(plan) for each in plans if _reach(each) <= _reach(plan))

    kept = max(set(plans), key=lambda plan: (saved(plan), _reach(plan)))
    return [kept if _reach(plan) <= _reach(kept) else widest for plan in plans]


def _reach(plan: Any) -> float:
    """How wide a plan's range is."""
    if isinstance(plan, ActivationPlan):
        return plan.largest
    return 0.0 if plan is None else plan.high / plan.low


def _work(plan: Any) -> int:
    """Messages of a plan on SEMI2K, but for a constant."""
    if isinstance(plan, ActivationPlan):
        return 2 * plan.chain.levels + 8 * plan.tail
    if isinstance(plan, Pieces):
        return 2 * plan.chain.levels + 9
    return 0 if plan is None else 2 * plan.levels


@dataclass(frozen=True)
class NarrowDecoder:
    """A decoder's layers and final norm with narrowed functions; embedding and output table stay those of `decoder`.

    params: "layers", a list of `LayerParams`, and "final".
    """

    decoder: Decoder
    plan: NarrowPlan
    params: Params

    def enter(self, x: jax.Array) -> jax.Array:
        """What the first layer takes, from what the embedding gives: centred where the family's norms subtract the mean."""
        return x if self.decoder.config.llama_like else x - jnp.mean(x, axis=-1, keepdims=True)

    def kind(self, i: int) -> int:
        """Layers of equal kinds run the same program."""
        return sorted(set(map(str, self.plan.layers))).index(str(self.plan.layers[i]))

    def layer(self, i: int) -> Callable:
        """Layer i as a function of (params, x, cache, window)."""
        return partial(block, self.decoder.config, self.plan.layers[i])

    def final(self, params: Any, x: jax.Array) -> jax.Array:
        """The last norm: x [n, width] -> [n, width], ready for the output layer."""
        h = norm(self.decoder.config, self.plan.final, params["norm"], x) * params["scale"]
        return h + params["bias"] if "bias" in params else h


def narrow_decoder(decoder: Decoder, calibration: Calibration, capacity: int, prefix: int = 0) -> NarrowDecoder:
    """The decoder narrowed to a calibration's ranges, for caches of `capacity` rows. Raises UserError as `plan_narrow`."""
    config = decoder.config
    plan = plan_narrow(config, calibration, capacity, prefix)
    learned = calibration.reference == "learned"
    layers = [
        narrow_layer(config, each, fold_layer(config, params), ranges, (reference, capacity) if learned else None)
        for each, params, ranges, reference in zip(
            plan.layers, decoder.params["layers"], calibration.layers, calibration.references, strict=True
        )
    ]
    gain = decoder.params["final"]["norm"]
    final = {"norm": norm_params(config, plan.final, calibration.final_squares), **gain}
    return NarrowDecoder(decoder, plan, {"layers": layers, "final": final})


def narrow_layer(
    config: DecoderConfig, plan: LayerPlan, layer: FoldedLayer, ranges: LayerRanges, learned: tuple[np.ndarray, int] | None
) -> LayerParams:
    """A folded layer and its norms' secret numbers; `learned` is each head's reference and the number of positions."""
    qkv, offsets = _dense(layer.qkv, layer.qkv_bias), None
    if learned is not None:
        weights, constant, slopes = np.split(learned[0], [config.width, config.width + 1])
        offsets = _float32(constant + place_features(np.arange(learned[1])) @ slopes)
        bias = None if qkv.bias is None else np.append(qkv.bias, np.zeros(config.heads, np.float32))
        qkv = Dense(np.concatenate([qkv.kernel, _float32(weights)], axis=1), bias)
    return LayerParams(
        norm_params(config, plan.norm, ranges.attention_squares),
        qkv,
        _dense(layer.out, layer.out_bias),
        norm_params(config, plan.norm, ranges.ffn_squares),
        _dense(layer.up, layer.up_bias),
        _dense(layer.down, layer.down_bias),
        offsets,
    )


def norm_params(config: DecoderConfig, plan: Chain | Pieces, squares: Range) -> NormParams:
    """A norm's secret numbers, such that the geometric middle of mean squares from least to largest falls on that of the plan."""
    phi = (plan.low * plan.high / (squares[0] * squares[1])) ** 0.5  # squared, in SOAL's terms
    weights = np.array(last_weights(plan)) * phi**0.5
    return NormParams(_float32(phi / config.width * 2.0**PHI_BITS), _float32(weights))


def _dense(kernel: np.ndarray, bias: np.ndarray | None) -> Dense:
    return Dense(_float32(kernel), None if bias is None else _float32(bias))


def _float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)
