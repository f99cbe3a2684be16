"""MPCFormer's quadratic functions (Li et al., ICLR 2023, section 3) in decoders of the GPT-2 and OPT families.

Softmax becomes (x + 5)^2 / sum (x + 5)^2 over the positions that may be seen ("2Quad"), and the activation 0.125 x^2 + 0.25 x + 0.5
("Quad", theirs for GELU, which here stands for OPT's ReLU). `quadratic(decoder)` gives a decoder of the same shapes, for stock SPU,
plaintext and training alike. A model trained without them is lost; MPCFormer distils, and so does make.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp

from spu_llm.models import Decoder
from spu_llm.models.decoder import FAMILIES
from spu_llm.models.gpt2 import Block as Gpt2Block
from spu_llm.models.gpt2 import FinalNorm

__all__ = ["Block", "FinalNorm", "quadratic"]

_SHIFT = 5.0  # c of the paper
_FAMILY = "quadratic"


class Block(Gpt2Block):
    """One layer: x [n, width] -> x [n, width], and the layer's cache."""

    @staticmethod
    def activation(x: jax.Array) -> jax.Array:
        return 0.125 * (x * (x + 2) + 4)

    @staticmethod
    def probabilities(scores: jax.Array, mask: jax.Array) -> jax.Array:
        root = jnp.where(mask, scores + _SHIFT, 0.0)
        squares = root * root
        return squares * (1.0 / jnp.sum(squares, axis=-1, keepdims=True))


def quadratic(decoder: Decoder) -> Decoder:
    """The decoder with quadratic functions and the same weights."""
    return Decoder(replace(decoder.config, family=_FAMILY), decoder.params)


FAMILIES[_FAMILY] = sys.modules[__name__]
