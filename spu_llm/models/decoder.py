"""A decoder: a configuration, its parameters, and the three steps that plaintext and secure runs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from . import gpt2, llama, mixtral, opt
from .cache import LayerCache, Window, cache_shape, window
from .config import DecoderConfig, Params

FAMILIES = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "opt": opt}
"""Each module has Block, FinalNorm, read_config and read_params."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model. Everything here is plain JAX: the same functions are traced for SPU."""

    config: DecoderConfig
    params: Params

    @property
    def head_table(self) -> np.ndarray:
        """The output layer, [vocabulary, width]."""
        return self.params["embed" if self.config.tied_head else "head"]["table"]

    def block(self, params: Params, x: jax.Array, cache: LayerCache, window: Window) -> tuple[jax.Array, LayerCache]:
        """One layer: x [n, width] -> x [n, width]."""
        out: Any = self._block.apply({"params": params}, x, cache, window)
        return out

    def final(self, params: Params, x: jax.Array) -> jax.Array:
        """The last norm: x [n, width] -> [n, width], ready for the output layer."""
        out: Any = self._final.apply({"params": params}, x)
        return out

    def enter(self, x: jax.Array) -> jax.Array:
        """What the first layer takes, from what the embedding gives: the same."""
        return x

    def layer(self, i: int) -> Callable:
        """Layer i as a function of (params, x, cache, window)."""
        return self.block

    def kind(self, i: int) -> int:
        """Layers of equal kinds are the same function."""
        return 0

    @property
    def _block(self) -> nn.Module:
        return FAMILIES[self.config.family].Block(self.config)

    @property
    def _final(self) -> nn.Module:
        return FAMILIES[self.config.family].FinalNorm(self.config)

    def check_shapes(self) -> None:
        """Raise UserError when a parameter is missing or has a shape the configuration does not give."""
        expected = jax.tree_util.tree_map(lambda leaf: tuple(leaf.shape), jax.eval_shape(self._expected))
        found = jax.tree_util.tree_map(np.shape, self.params)
        flat = dict(_flat(found))
        for path, shape in _flat(expected):
            if flat.get(path) != shape:
                raise UserError(f"checkpoint: {path} has shape {flat.get(path)} where the config gives {shape}")

    @classmethod
    def blind(cls, config: DecoderConfig) -> Decoder:
        """What is public of a decoder: its shapes, with zeros in place of weights."""
        shapes = jax.eval_shape(cls(config, {})._expected)
        return cls(config, jax.tree_util.tree_map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes))

    def _expected(self) -> Params:
        c = self.config
        x = jnp.zeros((1, c.width))
        cache = LayerCache(*(jnp.zeros(cache_shape(c, 1)) for _ in range(2)))
        layer = self._block.init(jax.random.PRNGKey(0), x, cache, window(c, 0, 1, 1))["params"]
        table = jnp.zeros((c.vocabulary, c.width))
        positions = {} if c.rope_base is not None else {"positions": jnp.zeros((c.positions, c.width))}
        return {
            "embed": {"table": table, **positions},
            "layers": [layer] * c.layers,
            "final": self._final.init(jax.random.PRNGKey(0), x)["params"],
            **({} if c.tied_head else {"head": {"table": table}}),
        }


def _flat(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]
    return [(path_name(path), leaf) for path, leaf in leaves]


def path_name(path: tuple) -> str:
    """A tree path as dotted text: layers.3.qkv.kernel."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
