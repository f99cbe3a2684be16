"""What the owner tells client and dealer of its predictors, where these are processes: shapes and counts, no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ..errors import UserError
from ..models.config import DecoderConfig
from .prepared import LayerSparsity, LowRank


@dataclass(frozen=True)
class LayerShape:
    """Of a layer's predictors; head_rank: None where all heads are computed."""

    blocks: int
    active_blocks: int
    rank: int
    head_rank: int | None
    active_heads: int


@dataclass(frozen=True)
class SparseTerms:
    """Each layer's shape, and how long a secret order serves (as in the experiment's settings): what programs follow from."""

    layers: tuple[LayerShape, ...]
    renew: int | Literal["token", "request"]

    def blind(self, config: DecoderConfig) -> tuple[LayerSparsity, ...]:
        """Layers with zeros for predictors, for who has no weights."""
        return tuple(
            LayerSparsity(
                np.arange(config.ffn, dtype=np.int32),
                _zeros(config.width, each.rank, each.blocks),
                each.active_blocks,
                None if each.head_rank is None else _zeros(config.width, each.head_rank, config.heads),
                each.active_heads,
            )
            for each in self.layers
        )

    def check(self, config: DecoderConfig, renew: int | str) -> None:
        """Raise UserError for what is not of this model, or not what was agreed to of orders."""
        if self.renew != renew:
            raise UserError(
                f"the owner has orders serve {self.renew}, where {renew} was agreed to; give both the same sparsity.renew"
            )
        if len(self.layers) != config.layers:
            raise UserError(f"the owner describes predictors of {len(self.layers)} layers, the model has {config.layers}")
        for i, each in enumerate(self.layers):
            ranks = [each.rank, *([] if each.head_rank is None else [each.head_rank])]
            parts = each.blocks >= 1 and config.ffn % each.blocks == 0 and all(1 <= rank <= config.width for rank in ranks)
            active = 1 <= each.active_blocks <= each.blocks and 1 <= each.active_heads <= config.heads
            if not parts or not active or (i == 0 and each.head_rank is not None):
                raise UserError(f"the owner describes predictors of layer {i} that no such layer can have: {each}")

    def to_json(self) -> bytes:
        return _TYPE.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes) -> SparseTerms:
        """The inverse of `to_json`. Raises UserError for what are no terms."""
        try:
            return _TYPE.validate_json(data)
        except ValidationError as error:
            raise UserError(f"the owner's description of its predictors is not valid ({error.errors()[0]['msg']})") from None


_TYPE = TypeAdapter(SparseTerms)


def terms_of(layers: Sequence[LayerSparsity], renew: int | Literal["token", "request"]) -> SparseTerms:
    shapes = (
        LayerShape(
            layer.blocks,
            layer.active_blocks,
            layer.neurons.first.shape[1],
            None if layer.heads is None else layer.heads.first.shape[1],
            layer.active_heads,
        )
        for layer in layers
    )
    return SparseTerms(tuple(shapes), renew)


def _zeros(width: int, rank: int, outputs: int) -> LowRank:
    return LowRank(*(np.zeros(shape, np.float32) for shape in ((width, rank), (rank,), (rank, outputs), (outputs,))))
