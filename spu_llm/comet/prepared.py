"""The prepared file of Comet: each layer's order of neurons and its predictors, in one safetensors file.

Facts are JSON in the file's metadata, arrays are tensors. **The file is the owner's secret, as the model is**: the predictors were
fitted to what the model computes. It is written so that its owner alone can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..models.config import DecoderConfig
from ..models.owner_file import OwnerFile

VERSION = 1
BUCKETS = 32
"""The number of active blocks is a multiple of blocks / 32."""
_FILE = OwnerFile("spu_llm comet", "a file of Comet", VERSION, "make it with `spu-llm prepare comet`")


class LowRank(NamedTuple):
    """scores = (y @ first + first_bias) @ second + second_bias: y [rows, width] -> [rows, outputs]. All float32.

    No non-linearity stands between: two products, as cheap on shares as products get (Comet, "Predictor").
    """

    first: Any  # [width, rank]
    first_bias: Any  # [rank]
    second: Any  # [rank, outputs]
    second_bias: Any  # [outputs]

    def scores(self, y: Any) -> Any:
        """Scores [rows, outputs] of y [rows, width], NumPy's or JAX's."""
        return (y @ self.first + self.first_bias) @ self.second + self.second_bias


Curve = tuple[float, ...]
"""A number for each count of computed blocks (or heads) of a token: 1, 2, ..., all."""


@dataclass(frozen=True)
class Measured:
    """What the computed blocks and heads of a layer hold, as shares of 1, of text that its predictors did not learn from.

    A neuron's mass is its ReLU output times the norm of its row of `down`; a head's is the norm of its part of the attention's
    output. zeros: ReLU outputs that are 0. recall, neuron_recall: the mass, and the number of firing neurons, in the layer's active
    blocks, chosen by its threshold as secure runs do (gate.py); head_recall: the mass of its active heads.

    Curves: by_threshold, neurons_by_threshold: the same for other numbers of blocks, each with its own of `thresholds`; by_score:
    the mass in the best-scoring blocks; oracle, neuron_oracle: in the blocks that have most mass; still: in those that have most
    over all the text, which takes no predictor; unclustered: the oracle's, had the neurons kept the checkpoint's order;
    heads_by_score, head_oracle: the mass of heads, empty where all are computed.
    """

    zeros: float
    recall: float
    neuron_recall: float
    thresholds: Curve
    by_threshold: Curve
    neurons_by_threshold: Curve
    by_score: Curve
    oracle: Curve
    neuron_oracle: Curve
    still: Curve
    unclustered: Curve
    head_recall: float = 1.0
    heads_by_score: Curve = ()
    head_oracle: Curve = ()


@dataclass(frozen=True)
class LayerSparsity:
    """Which of a layer's neurons and heads are computed for a token.

    order [ffn] int32: neurons (columns of up, rows of down) in blocks, b being order[b * size : (b + 1) * size].
    Blocks with most mass come first. neurons: scores of blocks from this layer's attention_norm output, half a layer ahead.
    active_blocks: how many are computed for every token: those that score more than the threshold, filled up or cut in order
    (gate.py). heads: scores of heads from the attention_norm output of the layer before; None where all are computed, as in
    layer 0. active_heads: how many are, the best-scoring ones.
    """

    order: np.ndarray
    neurons: LowRank
    active_blocks: int
    heads: LowRank | None
    active_heads: int
    threshold: float | None = None
    measured: Measured | None = None

    @property
    def blocks(self) -> int:
        return len(self.neurons.second_bias)

    def computing(self, blocks: int | None = None, heads: int | None = None) -> LayerSparsity:
        """The same with other numbers of active blocks (and the threshold for so many) and heads; None leaves a number as it is."""
        layer, measured = self, self.measured
        if blocks is not None:
            level = self.threshold if measured is None else measured.thresholds[blocks - 1]
            layer = replace(layer, active_blocks=blocks, threshold=level)
        if heads is not None:
            layer = replace(layer, active_heads=heads)
        if measured is None:
            return layer
        recalls: dict[str, Any] = {
            "recall": measured.by_threshold[layer.active_blocks - 1],
            "neuron_recall": measured.neurons_by_threshold[layer.active_blocks - 1],
            "head_recall": measured.heads_by_score[layer.active_heads - 1] if measured.heads_by_score else 1.0,
        }
        return replace(layer, measured=replace(measured, **recalls))

    @property
    def block_of(self) -> np.ndarray:
        """[ffn] int32 the block of each neuron in the checkpoint's order."""
        found = np.empty(len(self.order), np.int32)
        found[self.order] = np.arange(len(self.order)) // (len(self.order) // self.blocks)
        return found


@dataclass(frozen=True)
class Facts:
    """How a file was made. text: SHA-256 of the tokens read, `tokens` of them; recall, head_recall, neuron_recall: as asked for."""

    text: str
    tokens: int
    recall: float
    head_recall: float
    seed: int
    seconds: float
    neuron_recall: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A model made ready for sparse runs. digest: `content_digest` of its checkpoint."""

    layers: tuple[LayerSparsity, ...]
    model: str
    digest: str
    facts: Facts | None = None

    def save(self, path: Path) -> None:
        """Write the file whole or not at all, for its owner alone. Raises UserError where it cannot be written."""
        tensors = {name: value for i, layer in enumerate(self.layers) for name, value in _tensors(i, layer)}
        head = _Head(self.model, self.digest, self.facts, tuple(_public(layer) for layer in self.layers))
        _FILE.write(path, head, tensors)

    @classmethod
    def load(cls, path: Path) -> Prepared:
        """A file as it was saved; `check` says whether it is a model's. Raises UserError for a file that is none of ours."""
        head, tensors = _FILE.read(path, _Head)
        try:
            layers = tuple(_layer(tensors, i, public) for i, public in enumerate(head.layers))
        except (KeyError, ValueError) as error:
            raise _FILE.damaged(path, error) from None
        return cls(layers, head.model, head.digest, head.facts)

    def check(self, path: Path, config: DecoderConfig, digest: str) -> None:
        """Raise UserError where the file at `path` was not made of the model with this configuration and `content_digest`."""
        if self.digest != digest:
            raise UserError(
                f"{path}: was prepared for model {self.model} with other weights or tokenizer; name this model's own file, or "
                f"{_FILE.remedy}"
            )
        if len(self.layers) != config.layers:
            raise UserError(f"{path}: has {len(self.layers)} layers, the model {config.layers}; {_FILE.remedy} anew")
        for i, layer in enumerate(self.layers):
            found = [len(layer.order), *(predictor.first.shape[0] for predictor in (layer.neurons, layer.heads) if predictor)]
            wanted = [config.ffn] + [config.width] * (len(found) - 1)
            heads = config.heads if layer.heads is None else len(layer.heads.second_bias)
            if found != wanted or heads != config.heads:
                raise UserError(
                    f"{path}: layer {i} is of {found[0]} neurons, width {found[1]} and {heads} heads, the model of {config.ffn}, "
                    f"{config.width} and {config.heads}; {_FILE.remedy} anew"
                )


@dataclass(frozen=True)
class _Public:
    """What of a layer is no array."""

    active_blocks: int
    active_heads: int
    threshold: float | None
    heads: bool
    measured: Measured | None


@dataclass(frozen=True)
class _Head:
    model: str
    digest: str
    facts: Facts | None
    layers: tuple[_Public, ...]


def _public(layer: LayerSparsity) -> _Public:
    return _Public(layer.active_blocks, layer.active_heads, layer.threshold, layer.heads is not None, layer.measured)


def _tensors(i: int, layer: LayerSparsity) -> list[tuple[str, np.ndarray]]:
    found = [(f"{i}.order", np.asarray(layer.order, np.int32))]
    for part, predictor in (("neurons", layer.neurons), ("heads", layer.heads)):
        if predictor is not None:
            found += [
                (f"{i}.{part}.{name}", np.ascontiguousarray(value, np.float32)) for name, value in predictor._asdict().items()
            ]
    return found


def _layer(tensors: Mapping[str, np.ndarray], i: int, public: _Public) -> LayerSparsity:
    def predictor(part: str) -> LowRank:
        found = LowRank(*(tensors[f"{i}.{part}.{name}"] for name in LowRank._fields))
        rank, outputs = found.second.shape
        if (found.first.shape[1:], found.first_bias.shape, found.second_bias.shape) != ((rank,), (rank,), (outputs,)):
            raise ValueError(f"layer {i}, {part}: shapes do not fit")
        return found

    order, neurons, heads = tensors[f"{i}.order"], predictor("neurons"), predictor("heads") if public.heads else None
    blocks = len(neurons.second_bias)
    if len(order) % blocks or not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ValueError(f"layer {i}: {len(order)} neurons in {blocks} blocks are no order of all of them in equal blocks")
    if not 1 <= public.active_blocks <= blocks or public.active_heads < 1:
        raise ValueError(f"layer {i}: {public.active_blocks} active blocks of {blocks}, {public.active_heads} active heads")
    return LayerSparsity(order, neurons, public.active_blocks, heads, public.active_heads, public.threshold, public.measured)
