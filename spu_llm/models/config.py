"""What a decoder looks like, whatever file it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError

Params = dict[str, Any]
"""embed {table [vocabulary, width], positions [positions, width] if learned}; layers, a list; final; head {table} if untied."""

Reader = Callable[[str], np.ndarray]
"""Gives a checkpoint's tensor by its name, as float32; raises UserError when it is missing or unreadable."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a decoder-only language model.

    `rope_base` is None where positions are learned; `tied_head` means that the output layer is the embedding table.
    `end_tokens` stop a generation; `start_token` began the texts that the model was trained on. In a mixture of experts `ffn`
    is the width of one of `experts` feed-forward parts, of which a token's output takes `experts_per_token`; both are None
    elsewhere.
    """

    family: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    positions: int
    epsilon: float
    tied_head: bool
    rope_base: float | None = None
    end_tokens: tuple[int, ...] = ()
    experts: int | None = None
    experts_per_token: int | None = None
    start_token: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for shapes that make no decoder."""
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "ffn", "positions"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, not a whole number above 0")
        self._check_heads()
        if self.rope_base is not None and (self.rope_base <= 0 or self.head_width % 2):
            raise ValueError(
                f"rotary positions need a positive base and an even head width, not {self.rope_base} and {self.head_width}"
            )
        if not 0 < self.epsilon < 1 or type(self.tied_head) is not bool:
            raise ValueError(f"epsilon {self.epsilon!r} or tied_head {self.tied_head!r} makes no sense")
        self._check_experts()

    def _check_heads(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}: each must be a multiple of the next"
            )

    def _check_experts(self) -> None:
        experts, chosen = self.experts, self.experts_per_token
        if experts is None and chosen is None:
            return
        if type(experts) is not int or type(chosen) is not int or not 1 <= chosen <= experts:
            raise ValueError(f"{chosen!r} experts a token of {experts!r}; give whole numbers from 1 to as many as there are")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Hidden units of the feed-forward part, those of all experts together."""
        return self.ffn * (self.experts or 1)

    @property
    def llama_like(self) -> bool:
        """Whether norms take no mean away and the feed-forward part is gated by SiLU: Llama, and what is built on it."""
        return self.family in ("llama", "mixtral")


def refuse(hf: dict[str, Any], key: str, only: Any) -> None:
    """Raise UserError when a Hugging Face config asks for something other than the one value we implement."""
    value = hf.get(key)
    if value is not None and value != only:
        raise UserError(f"config.json: {key} is {value!r}, but only {only!r} is supported for {hf.get('model_type')}")


def end_tokens(hf: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text; configs hold one, a list, or none."""
    value = hf.get("eos_token_id")
    return () if value is None else tuple(int(token) for token in np.atleast_1d(value))


def start_token(hf: dict[str, Any]) -> int | None:
    """The id that begins a text; None where the config names none that is in the vocabulary."""
    value = hf.get("bos_token_id")
    return value if type(value) is int and 0 <= value < hf["vocab_size"] else None
