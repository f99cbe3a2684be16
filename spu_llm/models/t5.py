"""T5: an encoder over the prompt and a decoder with a cache, RMS norms, relative positions in buckets.

Both generations: 1.0 has a ReLU feed-forward part and its output layer is the embedding table; 1.1 and FLAN-T5 have a GELU gate
and an output layer of their own. Raffel et al., JMLR 2020; positions: its section 2.1. Scores are not divided by sqrt(head_width).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .cache import LayerCache, Window, cache_shape, window
from .config import DecoderConfig, Params, Reader, end_tokens, refuse
from .decoder import Decoder
from .layers import RMSNorm, softmax
from .llama import joined
from .plain import PlainDecoder

_POSITIONS = 2**31 - 1  # relative positions set no limit: beyond the last bucket's distance they are all alike
_FEED_FORWARD = {"relu": False, "gated-gelu": True}
_TOGETHER = 1 << 18
"""Scores of all heads up to which one product serves the encoder's heads: with more, the columns that are thrown away take longer
(8 bytes each, heads times as many) than the two messages a head that it saves, at 1 Gbps and 10 ms."""


@dataclass(frozen=True, kw_only=True)
class T5Config(DecoderConfig):
    """A decoder's shapes, and those of the encoder and of relative positions.

    `layers` are the decoder's; `key_width` is the width of a head, so that all heads together may be wider or narrower than the
    model; `buckets` and `distance`: numbers that a relative position can take, and the distance from which on it takes the last.
    `start_token` is what the decoder begins with.
    """

    encoder_layers: int
    key_width: int
    buckets: int
    distance: int
    gated: bool

    def _check_heads(self) -> None:
        for name in ("encoder_layers", "key_width", "buckets", "distance"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, not a whole number above 0")
        if self.buckets % 4 or self.distance <= self.buckets // 2:
            raise ValueError(f"{self.buckets} buckets up to distance {self.distance}; a multiple of 4, and more than half as far")
        if self.start_token is None:
            raise ValueError("decoder_start_token_id is missing or not in the vocabulary")

    @property
    def head_width(self) -> int:
        return self.key_width

    @property
    def heads_width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.key_width


class Cross(NamedTuple):
    """What a decoder layer sees of the encoded prompt of `length` tokens, in the layout in which it is multiplied.

    keys [head_width, heads * length], values [length, heads * head_width].
    """

    keys: Any
    values: Any


def cross_shapes(config: T5Config, length: int) -> Cross:
    return Cross((config.head_width, config.heads * length), (length, config.heads_width))


def decoder_buckets(config: T5Config, start: int, count: int, length: int) -> np.ndarray:
    """Buckets [count, length] int32 of the first `length` cache rows, seen from `count` tokens that start at position `start`."""
    back = start + np.arange(count)[:, None] - np.arange(length)[None, :]
    return _bucket(np.maximum(back, 0), config.buckets, config.distance)


def encoder_buckets(config: T5Config, count: int) -> np.ndarray:
    """Buckets [count, count] int32 of a text's tokens, seen from each of them: half of the buckets for each direction."""
    ahead = np.arange(count)[None, :] - np.arange(count)[:, None]
    half = config.buckets // 2
    return (_bucket(np.abs(ahead), half, config.distance) + half * (ahead > 0)).astype(np.int32)


def _bucket(away: np.ndarray, buckets: int, distance: int) -> np.ndarray:
    """One bucket each for the first half of distances, then logarithmically wider ones up to `distance`."""
    exact = buckets // 2
    octaves = np.log(np.maximum(away, 1).astype(np.float32) / exact) / np.float32(np.log(distance / exact))
    wide = exact + (octaves * (buckets - exact)).astype(np.int32)
    return np.where(away < exact, away, np.minimum(wide, buckets - 1)).astype(np.int32)


def relative_bias(table: jax.Array, buckets: jax.Array) -> jax.Array:
    """What relative positions add to scores [heads, n, length], from a table [buckets, heads]: a gather at public places, local."""
    return table.at[buckets].get(mode="promise_in_bounds").transpose(2, 0, 1)


def attend(q: jax.Array, seen: Cross, mask: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    """Attention of n queries [n, heads * head_width] where `mask` is True; returns [n, heads * head_width].

    All heads are one product, of which each takes its own columns: SPU sends for a batch of products as often as it has members.
    """
    n, width = len(q), len(seen.keys)
    heads = q.shape[1] // width
    rows = q.reshape(n, heads, width).transpose(1, 0, 2).reshape(heads * n, width)
    weights = softmax(_own(rows @ seen.keys, heads) + bias, mask)
    mixed = _own(weights.reshape(heads * n, -1) @ seen.values, heads)
    return mixed.transpose(1, 0, 2).reshape(n, heads * width)


def attend_apart(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, bias: jax.Array) -> jax.Array:
    """As `attend`, with a product for each head; keys and values are [length, heads, head_width]."""
    n, heads = len(q), keys.shape[1]
    rows = q.reshape(n, heads, -1).transpose(1, 0, 2)
    weights = softmax(rows @ keys.transpose(1, 2, 0) + bias, mask)
    return (weights @ values.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(n, -1)


def _own(products: jax.Array, heads: int) -> jax.Array:
    """Of every head's rows with every head's columns [heads * n, heads * m], those with its own: [heads, n, m]."""
    blocks = products.reshape(heads, len(products) // heads, heads, -1)
    return jnp.stack([blocks[head, :, head] for head in range(heads)])


def _by_column(keys: jax.Array, values: jax.Array) -> Cross:
    """Rows of keys and values [length, heads, head_width] as they are multiplied."""
    length, _, width = keys.shape
    return Cross(keys.transpose(2, 1, 0).reshape(width, -1), values.reshape(length, -1))


class _Layer(nn.Module):
    """What encoder and decoder layers have in common."""

    config: T5Config

    def heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.config.heads, self.config.head_width)

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """x [n, width] and what the feed-forward part adds to it."""
        c = self.config
        h = RMSNorm(c.epsilon, name="ffn_norm")(x)
        if c.gated:
            gate, up = jnp.split(nn.Dense(2 * c.ffn, use_bias=False, name="gate_up")(h), 2, axis=-1)
            h = nn.gelu(gate, approximate=True) * up
        else:
            h = nn.relu(nn.Dense(c.ffn, use_bias=False, name="up")(h))
        return x + nn.Dense(c.width, use_bias=False, name="down")(h)


class EncoderBlock(_Layer):
    """One layer: x [n, width] -> x [n, width]; `shown` [n] is False for padding, `bias` [heads, n, n]."""

    @nn.compact
    def __call__(self, x: jax.Array, shown: jax.Array, bias: jax.Array) -> jax.Array:
        c = self.config
        h = RMSNorm(c.epsilon, name="attention_norm")(x)
        q, k, v = jnp.split(nn.Dense(3 * c.heads_width, use_bias=False, name="qkv")(h), 3, axis=-1)
        k, v = self.heads(k), self.heads(v)
        together = bias.size <= _TOGETHER
        mixed = attend(q, _by_column(k, v), shown, bias) if together else attend_apart(q, k, v, shown, bias)
        return self.feed_forward(x + nn.Dense(c.width, use_bias=False, name="out")(mixed))


class DecoderBlock(_Layer):
    """One layer: x [n, width] -> x [n, width], and the layer's cache.

    `bias` [heads, n, length of the window]; `cross` is the encoded prompt, `shown` [its length] False for its padding.
    """

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: LayerCache, window: Window, bias: jax.Array, cross: Cross, shown: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        c = self.config
        h = RMSNorm(c.epsilon, name="attention_norm")(x)
        q, k, v = jnp.split(nn.Dense(3 * c.heads_width, use_bias=False, name="qkv")(h), 3, axis=-1)
        origin = (window.start, jnp.int32(0), jnp.int32(0))
        cache = LayerCache(
            jax.lax.dynamic_update_slice(cache.keys, self.heads(k), origin),
            jax.lax.dynamic_update_slice(cache.values, self.heads(v), origin),
        )
        length = window.mask.shape[1]
        mixed = attend(q, _by_column(cache.keys[:length], cache.values[:length]), window.mask, bias)
        x = x + nn.Dense(c.width, use_bias=False, name="out")(mixed)
        h = RMSNorm(c.epsilon, name="cross_norm")(x)
        q = nn.Dense(c.heads_width, use_bias=False, name="cross_q")(h)
        x = x + nn.Dense(c.width, use_bias=False, name="cross_out")(attend(q, cross, shown))
        return self.feed_forward(x), cache


class CrossKeys(_Layer):
    """What a decoder layer sees of the encoder's output x [length, width]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Cross:
        k, v = jnp.split(nn.Dense(2 * self.config.heads_width, use_bias=False, name="kv")(x), 2, axis=-1)
        return _by_column(self.heads(k), self.heads(v))


class FinalNorm(nn.Module):
    """What stands between a stack's last layer and what comes after it."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return RMSNorm(self.config.epsilon, name="norm")(x)


@dataclass(frozen=True)
class T5(Decoder):
    """An encoder and a decoder: `params` has a decoder's parts, and besides

    `encoder`, with `layers` and `final`; `cross`, one a decoder layer; `relative` with tables [buckets, heads], one a stack.
    """

    config: T5Config

    def encoder_block(self, params: Params, x: jax.Array, shown: jax.Array, bias: jax.Array) -> jax.Array:
        """One encoder layer: x [n, width] -> x [n, width]."""
        out: Any = EncoderBlock(self.config).apply({"params": params}, x, shown, bias)
        return out

    def decoder_block(self, params: Params, x: jax.Array, cache: LayerCache, *seen: Any) -> tuple[jax.Array, LayerCache]:
        """One decoder layer; `seen` as `DecoderBlock` has them."""
        out: Any = DecoderBlock(self.config).apply({"params": params}, x, cache, *seen)
        return out

    def cross(self, final: Params, params: Params, x: jax.Array) -> Cross:
        """What a decoder layer sees of what the last encoder layer gives, x [length, width]; `final` is the encoder's norm."""
        out: Any = CrossKeys(self.config).apply({"params": params}, self.final(final, x))
        return out

    def layer(self, i: int) -> Callable:
        return self.decoder_block

    @property
    def _final(self) -> nn.Module:
        return FinalNorm(self.config)

    def _expected(self) -> Params:
        c, key = self.config, jax.random.PRNGKey(0)
        x, bias, shown = jnp.zeros((1, c.width)), jnp.zeros((c.heads, 1, 1)), jnp.ones(1, bool)
        cache = LayerCache(*(jnp.zeros(cache_shape(c, 1)) for _ in range(2)))
        cross = Cross(*(jnp.zeros(shape) for shape in cross_shapes(c, 1)))
        layer = DecoderBlock(c).init(key, x, cache, window(c, 0, 1, 1), bias, cross, shown)["params"]
        encoder = EncoderBlock(c).init(key, x, shown, bias)["params"]
        final, table = FinalNorm(c).init(key, x)["params"], jnp.zeros((c.vocabulary, c.width))
        relative = jnp.zeros((c.buckets, c.heads))
        return {
            "embed": {"table": table},
            "encoder": {"layers": [encoder] * c.encoder_layers, "final": final},
            "cross": [CrossKeys(c).init(key, x)["params"]] * c.layers,
            "relative": {"encoder": relative, "decoder": relative},
            "layers": [layer] * c.layers,
            "final": final,
            **({} if c.tied_head else {"head": {"table": table}}),
        }


class PlainT5(PlainDecoder):
    """A T5 with its cache, on this machine, in float32.

    `encode` takes the prompt, `advance` decoder tokens, from the start token on; `roll_back` forgets the last ones.
    """

    decoder: T5

    def __init__(self, model: T5, capacity: int):
        super().__init__(model, capacity)
        self._block = jax.jit(model.decoder_block)
        self._encoder_block, self._cross_keys = jax.jit(model.encoder_block), jax.jit(model.cross)
        self._bias = jax.jit(relative_bias)
        self._cross: list[Cross] = []
        self._shown = np.ones(0, bool)

    def encode(self, tokens: Sequence[int]) -> None:
        """Take a prompt; what was decoded before is forgotten."""
        params, ids = self._params, np.asarray(tokens)
        x, self._shown = params["embed"]["table"][ids], np.ones(len(ids), bool)
        bias = self._bias(params["relative"]["encoder"], encoder_buckets(self.decoder.config, len(ids)))
        for layer in params["encoder"]["layers"]:
            x = self._encoder_block(layer, x, self._shown, bias)
        self._cross = [self._cross_keys(params["encoder"]["final"], layer, x) for layer in params["cross"]]
        self.length = 0

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [n, vocabulary] after each of n decoder tokens."""
        config, params, ids = self.decoder.config, self._params, np.asarray(tokens)
        x, place = params["embed"]["table"][ids], window(config, self.length, len(ids), self.capacity)
        bias = self._bias(params["relative"]["decoder"], decoder_buckets(config, self.length, len(ids), self.capacity))
        for i, (layer, cross) in enumerate(zip(params["layers"], self._cross, strict=True)):
            x, self.cache[i] = self._block(layer, x, self.cache[i], place, bias, cross, self._shown)
        self.length += len(ids)
        return np.asarray(self._logits(params["final"], params["embed" if config.tied_head else "head"]["table"], x))

    def roll_back(self, length: int) -> None:
        """Keep the first `length` decoder tokens only."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} positions")
        self.length = length


def read_config(hf: dict[str, Any]) -> T5Config:
    """The model described by a Hugging Face config of type "t5". Raises UserError for what we cannot run."""
    kind = hf.get("feed_forward_proj", "relu")
    if kind not in _FEED_FORWARD:
        refuse(hf, "feed_forward_proj", "gated-gelu")
    start = hf.get("decoder_start_token_id", hf.get("pad_token_id", 0))
    return T5Config(
        family="t5",
        vocabulary=hf["vocab_size"],
        width=hf["d_model"],
        layers=hf["num_layers"] if hf.get("num_decoder_layers") is None else hf["num_decoder_layers"],
        encoder_layers=hf["num_layers"],
        heads=hf["num_heads"],
        kv_heads=hf["num_heads"],
        key_width=hf["d_kv"],
        ffn=hf["d_ff"],
        positions=_POSITIONS,
        buckets=hf.get("relative_attention_num_buckets", 32),
        distance=hf.get("relative_attention_max_distance", 128),
        epsilon=hf.get("layer_norm_epsilon", 1e-6),
        gated=_FEED_FORWARD[kind],
        tied_head=hf.get("tie_word_embeddings", True),
        end_tokens=end_tokens(hf),
        start_token=start if type(start) is int and 0 <= start < hf["vocab_size"] else None,
    )


def read_params(tensor: Reader, config: T5Config) -> Params:
    """Parameters under their Hugging Face names; kernels become [in, out], those of one input are put side by side.

    A tied output layer takes hidden values divided by sqrt(width): that stands in the decoder's last norm.
    """
    feed_forward = ("wi_0", "wi_1") if config.gated else ("wi",)

    def attention(name: str) -> Params:
        qkv = joined(tensor, *(f"{name}.0.SelfAttention.{part}" for part in "qkv"))
        return {
            "attention_norm": {"scale": tensor(f"{name}.0.layer_norm.weight")},
            "qkv": {"kernel": qkv},
            "out": {"kernel": joined(tensor, f"{name}.0.SelfAttention.o")},
        }

    def hidden(name: str) -> Params:
        return {
            "ffn_norm": {"scale": tensor(f"{name}.layer_norm.weight")},
            "gate_up" if config.gated else "up": {"kernel": joined(tensor, *(f"{name}.DenseReluDense.{w}" for w in feed_forward))},
            "down": {"kernel": joined(tensor, f"{name}.DenseReluDense.wo")},
        }

    def decoder_layer(name: str) -> Params:
        return {
            **attention(name),
            "cross_norm": {"scale": tensor(f"{name}.1.layer_norm.weight")},
            "cross_q": {"kernel": joined(tensor, f"{name}.1.EncDecAttention.q")},
            "cross_out": {"kernel": joined(tensor, f"{name}.1.EncDecAttention.o")},
            **hidden(f"{name}.2"),
        }

    encoder = [f"encoder.block.{i}.layer" for i in range(config.encoder_layers)]
    decoder = [f"decoder.block.{i}.layer" for i in range(config.layers)]
    bias = "SelfAttention.relative_attention_bias.weight"
    scale = tensor("decoder.final_layer_norm.weight") * (np.float32(config.width**-0.5) if config.tied_head else 1)
    params: Params = {
        "embed": {"table": tensor("shared.weight")},
        "encoder": {
            "layers": [{**attention(name), **hidden(f"{name}.1")} for name in encoder],
            "final": {"norm": {"scale": tensor("encoder.final_layer_norm.weight")}},
        },
        "cross": [{"kv": {"kernel": joined(tensor, *(f"{name}.1.EncDecAttention.{part}" for part in "kv"))}} for name in decoder],
        "relative": {stack: tensor(f"{stack}.block.0.layer.0.{bias}") for stack in ("encoder", "decoder")},
        "layers": [decoder_layer(name) for name in decoder],
        "final": {"norm": {"scale": scale}},
    }
    if not config.tied_head:
        params["head"] = {"table": tensor("lm_head.weight")}
    return params
