"""One decoder layer for one new token: traffic, seconds and error against float64."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from ..errors import UserError
from ..models.cache import LayerCache, Window, cache_shape, window
from ..models.config import DecoderConfig
from ..models.decoder import FAMILIES, Decoder, path_name
from ..runtime import ProtocolConfig, Session, Slot
from .plugin_layer import bench_plugin_layer

_SEED = 0


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
    """Run the layer on stock SPU with cached weights or on the plugin, stock SPU beside it; figures of one pass after set-up.

    The plugin's error is that of the output without its mean where the family's norms subtract it: its stream is centred.
    Weights are normal with deviation 0.04, inputs standard normal, cached keys small and cached values standard normal.
    """
    config = shape.config()
    decoder = Decoder(config, {})
    params, x, cache = _inputs(config, shape.context)
    place = window(config, shape.context, 1, shape.context + 1)
    stock = stock_layer(decoder, params, x, cache, place, protocol, repeats)
    if ops == "stock":
        return stock
    found, y = bench_plugin_layer(config, params, x, cache, place, repeats)
    want = _reference(decoder, params, x, cache, place)
    want = want if config.llama_like else want - want.mean(-1, keepdims=True)
    return {**found, "max_error": float(np.abs(y - want).max()), "stock": stock}


def stock_layer(
    decoder: Decoder, params: Any, x: np.ndarray, cache: LayerCache, place: Window, protocol: ProtocolConfig, repeats: int
) -> dict[str, Any]:
    with Session(protocol) as session:
        names = _share(session, params, x, cache, place)
        slots = jax.tree_util.tree_map(lambda value: Slot(value.shape), (params, x, cache))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        program = session.compile("layer", decoder.block, (*slots, public))
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
        "max_error": float(np.abs(y - _reference(decoder, params, x, cache, place)).max()),
        "failure_probability": protocol.failure_probability,
        "trust": protocol.trust,
        "operations": {name: vars(cost) for name, cost in phase.ops.items() if cost.messages},
    }


def _inputs(config: DecoderConfig, context: int) -> tuple[Any, np.ndarray, LayerCache]:
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


def _share(session: Session, params: Any, x: np.ndarray, cache: LayerCache, place: Window) -> tuple:
    """Share everything and return the tree of variable names that a run takes."""

    def share(path: tuple, value: np.ndarray) -> str:
        name = path_name(path)
        session.share(name, value, "owner")
        if name.endswith("kernel"):
            session.keep_opened(name, Slot(value.shape))
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
