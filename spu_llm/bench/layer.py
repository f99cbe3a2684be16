"""One decoder layer for one new token: traffic, seconds and error against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from ..errors import UserError
from ..models.cache import LayerCache, Window, cache_shape, window
from ..models.calibration import LayerRanges
from ..models.config import DecoderConfig
from ..models.decoder import FAMILIES, Decoder, path_name
from ..models.folded import fold_layer
from ..models.narrow import narrow_layer
from ..models.narrow_block import LayerPlan, block
from ..primitives.narrow.activation import activation_plan
from ..primitives.narrow.inverse_root import inverse_root_plan
from ..primitives.narrow.softmax import softmax_plan
from ..runtime import ProtocolConfig, Session, Slot
from .plugin_layer import bench_plugin_layer

_SEED = 0
_RELATIVE = -18.0, 3.0  # scores less that of position 0, as the plugin's layer has them
_SQUARES = 27.5  # largest over least mean square
_ACTIVATION = {"gpt2": ("gelu_tanh", 8.0)}  # and SiLU up to 16 elsewhere


@dataclass(frozen=True)
class LayerShape:
    """The layer that is measured, and how many positions its cache holds already."""

    family: str
    width: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    experts: int | None = None
    experts_per_token: int | None = None

    def config(self) -> DecoderConfig:
        rope = 10000.0 if self.family in ("llama", "mixtral") else None
        experts: dict[str, Any] = {"experts": self.experts, "experts_per_token": self.experts_per_token}
        shape = (1, self.width, 1, self.heads, self.kv_heads, self.ffn, self.context + 1)
        try:
            return DecoderConfig(self.family, *shape, epsilon=1e-5, tied_head=True, rope_base=rope, **experts)
        except ValueError as error:
            raise UserError(f"bench layer: {error}; change --width, --heads, --kv-heads or --experts") from None


def bench_layer(shape: LayerShape, protocol: ProtocolConfig, repeats: int, ops: str = "stock") -> dict[str, Any]:
    """Run the layer on stock SPU with cached weights, or on the plugin or SPU with narrowed functions (generic), stock SPU beside
    it; figures of one pass after set-up.

    But for stock SPU the error is that of the output without its mean where the family's norms subtract it: streams are centred.
    Weights are normal with deviation 0.04, inputs standard normal, cached keys small and cached values standard normal.
    """
    config = shape.config()
    decoder = Decoder(config, {})
    params, x, cache = layer_inputs(config, shape.context)
    place = window(config, shape.context, 1, shape.context + 1)
    stock = stock_layer(decoder, params, x, cache, place, protocol, repeats)
    if ops == "stock":
        return stock
    if ops == "generic":
        found, y = generic_layer(config, params, x, cache, place, protocol, repeats)
    else:
        found, y = bench_plugin_layer(config, params, x, cache, place, repeats)
    want = _reference(decoder, params, x, cache, place)
    want = want if config.llama_like else want - want.mean(-1, keepdims=True)
    return {**found, "max_error": float(np.abs(y - want).max()), "stock": stock}


def stock_layer(
    decoder: Decoder, params: Any, x: np.ndarray, cache: LayerCache, place: Window, protocol: ProtocolConfig, repeats: int
) -> dict[str, Any]:
    """The layer on SPU's own functions."""
    found, y = spu_layer(decoder.block, params, x, cache, place, protocol, repeats)
    return {**found, "max_error": float(np.abs(y - _reference(decoder, params, x, cache, place)).max())}


def generic_layer(
    config: DecoderConfig, params: Any, x: np.ndarray, cache: LayerCache, place: Window, protocol: ProtocolConfig, repeats: int
) -> tuple[dict[str, Any], np.ndarray]:
    """The layer on SPU with narrowed functions, softmax relative to position 0; ranges are those of usual models."""
    softmax = softmax_plan(_RELATIVE, (0.0, _RELATIVE[1] + log(place.mask.shape[1])), place.mask.shape[1])
    activation = None if config.family == "opt" else activation_plan(*_ACTIVATION.get(config.family, ("silu", 16.0)))
    plan = LayerPlan(inverse_root_plan(_SQUARES), softmax, activation)
    near_one = (0.5, 2.0)
    ranges = LayerRanges(near_one, near_one, (0, 0), (0, 0), (0, 0))
    narrow = narrow_layer(config, plan, fold_layer(config, params), ranges, None)
    centred = x if config.llama_like else x - x.mean(-1, keepdims=True)
    return spu_layer(partial(block, config, plan), narrow, centred, cache, place, protocol, repeats)


def spu_layer(
    function: Callable, params: Any, x: np.ndarray, cache: LayerCache, place: Window, protocol: ProtocolConfig, repeats: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of a pass of function(params, x, cache, place) on SPU, and its output."""
    with Session(protocol) as session:
        names = share_layer(session, params, x, cache, place)
        slots = jax.tree_util.tree_map(lambda value: Slot(value.shape), (params, x, cache))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        program = session.compile("layer", function, (*slots, public))
        results = ("y", LayerCache("new.keys", "new.values"))
        session.run(program, names, results)  # opens the masked weights
        seconds = []
        for i in range(repeats):
            with session.phase(f"pass {i}") as phase:
                session.run(program, names, results)
            seconds.append(phase.seconds)
        y = session.receive("y")
    return {
        "bytes": phase.bytes,
        "messages": phase.messages,
        "seconds": median(seconds),
        "failure_probability": protocol.failure_probability,
        "trust": protocol.trust,
        "operations": {name: vars(cost) for name, cost in phase.ops.items() if cost.messages},
    }, y


def layer_inputs(config: DecoderConfig, context: int) -> tuple[Any, np.ndarray, LayerCache]:
    """A layer's weights, one token's x [1, width], and a cache with `context` rows and room for one more."""
    random = np.random.default_rng(_SEED)
    x = random.standard_normal((1, config.width), np.float32)
    params = random_params(config, random)
    keys, values = (random.standard_normal(cache_shape(config, context + 1), np.float32) for _ in range(2))
    return params, x, LayerCache(0.1 * keys, values)


def random_params(config: DecoderConfig, random: np.random.Generator, deviation: float = 0.04) -> Any:
    """A layer's weights: normal numbers, gains 1."""
    x = np.zeros((1, config.width), np.float32)
    zeros = LayerCache(*(np.zeros(cache_shape(config, 1), np.float32) for _ in range(2)))
    block = FAMILIES[config.family].Block(config)
    like = jax.eval_shape(block.init, jax.random.PRNGKey(0), x, zeros, window(config, 0, 1, 1))["params"]
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _weight(random, path_name(path), leaf.shape, deviation), like)


def _weight(random: np.random.Generator, name: str, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    return np.ones(shape, np.float32) if name.endswith("scale") else deviation * random.standard_normal(shape, np.float32)


def share_layer(session: Session, params: Any, x: np.ndarray, cache: LayerCache, place: Window) -> tuple:
    """Share everything and return the tree of variable names that a run takes."""

    def share(path: tuple, value: np.ndarray) -> str:
        name = path_name(path)
        (session.share_operand if name.endswith("kernel") else session.share)(name, value, "owner")
        return name

    names = jax.tree_util.tree_map_with_path(share, params)
    session.share("x", x, "client")
    for name, value in zip(("keys", "values"), cache, strict=True):
        session.share(name, value, "owner")
    for field, value in zip(Window._fields, place, strict=True):
        session.publish(field, value)
    return names, "x", LayerCache("keys", "values"), Window(*Window._fields)


def _reference(decoder: Decoder, params: Any, x: np.ndarray, cache: LayerCache, place: Window) -> np.ndarray:
    """The same layer in float64."""
    with enable_x64():
        double = jax.tree_util.tree_map(lambda value: jnp.asarray(value, jnp.float64), (params, x, cache))
        y, _ = decoder.block(double[0], double[1], double[2], place)
        return np.asarray(y)
