"""Models known by their shapes alone, and random weights for them."""

from __future__ import annotations

import jax
import numpy as np

from ..models.config import DecoderConfig
from ..models.decoder import Decoder, path_name


def _gpt2(vocabulary: int, width: int, layers: int, heads: int, positions: int) -> DecoderConfig:
    return DecoderConfig("gpt2", vocabulary, width, layers, heads, heads, 4 * width, positions, 1e-5, True)


SHAPES = {
    "gpt2-small": _gpt2(50257, 768, 12, 12, 1024),
    "gpt2-tiny": _gpt2(97, 32, 2, 4, 256),
    "llama-tiny": DecoderConfig("llama", 120, 48, 3, 6, 2, 136, 256, 1e-5, False, rope_base=10000.0),
}

_LOGIT = 4.0
"""Standard deviation of random weights' logits: a spread of some 30 over a vocabulary, as trained models have."""


def random_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Weights drawn so that values keep their size through the layers: kernels over the root of what they sum, small biases."""
    draw = np.random.default_rng(seed)

    def drawn(path: tuple, leaf: np.ndarray) -> np.ndarray:
        name = path_name(path)
        if name.endswith("scale"):
            return np.ones(leaf.shape, np.float32)
        size = {"kernel": leaf.shape[0] ** -0.5, "table": _LOGIT * config.width**-0.5}.get(name.split(".")[-1], 0.02)
        return draw.standard_normal(leaf.shape, np.float32) * np.float32(size)

    return Decoder(config, jax.tree_util.tree_map_with_path(drawn, Decoder.blind(config).params))
