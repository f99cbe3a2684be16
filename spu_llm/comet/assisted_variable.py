"""Sparse decoding with a dealer where every token has as many blocks of neurons computed as score above the threshold.

A layer is two programs: attention, which ends with the disclosed places, and the feed-forward half for as many blocks as its bucket
holds, compiled for a few sizes. That takes no message more. How many blocks score above the threshold names one token in four to
six by itself (docs/leakage.md), so `SparseAssistedDecoder`'s constant count is the default.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..progress import Progress, silent
from ..runtime import Slot
from ..runtime.assisted import Call, DealtProgram
from .assisted import SparseAssistedDecoder
from .fixed_sparse import SparseParams, SparsePlan, gated_attention, sparse_ffn

_MASK = "active.blocks"
_PLACES = "active.places"


@dataclass
class Filled:
    """Blocks that scored above the threshold, and blocks that were computed because a bucket holds so many; over tokens, layers."""

    needed: int = 0
    computed: int = 0
    of: int = 0

    @property
    def waste(self) -> float | None:
        """The share of what was computed that no token asked for."""
        return 1 - self.needed / self.computed if self.computed else None

    @property
    def share(self) -> float | None:
        """The share of all blocks that was computed."""
        return self.computed / self.of if self.of else None


def buckets(blocks: int) -> list[int]:
    """Counts of blocks that there are programs for: a 32nd of all, and twice as many each, up to all."""
    sizes = [max(1, blocks // 32)]
    while sizes[-1] < blocks:
        sizes.append(min(blocks, 2 * sizes[-1]))
    return sizes


def filled_up(mask: np.ndarray) -> np.ndarray:
    """Where the ones of each row of a public mask [n, blocks] stand, and other places up to the smallest bucket for all rows."""
    most = int(mask.sum(1).max())
    size = next(size for size in buckets(mask.shape[1]) if size >= most)
    return np.sort(np.argsort(mask == 0, axis=1, kind="stable")[:, :size], axis=1)


class VariableAssistedDecoder(SparseAssistedDecoder):
    """As `SparseAssistedDecoder`, but how many blocks are computed varies, and a pass takes the bucket of its most active token.

    What each party learns beyond it: of every layer and token, how many blocks are active; the dealer: the buckets.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.filled = Filled()

    def set_up(self, prompt_tokens: int = 1, progress: Progress = silent, scored: Collection[int] = ()) -> None:
        super().set_up(prompt_tokens, progress, scored)
        sizes = {1, self.passes(prompt_tokens)[0], *scored}
        wanted = [(n, kind, count) for n in sizes for kind in self._layer_slots for count in buckets(self._blocks(kind))]
        with self.session.phase("setup"):
            for each in progress(wanted, "compiling buckets", "program"):
                self._ffn_program(*each)

    def _blocks(self, kind: SparsePlan) -> int:
        return self._layer_slots[kind].neurons.order.shape[0]

    def _run_layers(self, n: int, where: Sequence[Any]) -> None:
        for i, kind in enumerate(self._kinds):
            self.assisted.run_all([self._call(i, n, where)])
            mask = self.session.public(_MASK)
            places = filled_up(mask)
            self.filled.needed += int(mask.sum())
            self.filled.computed += places.size
            self.filled.of += mask.size
            self.session.publish(_PLACES, places)
            self.assisted.run(self._ffn_program(n, kind, places.shape[1]), [_second(self._layers[i]), "x", _PLACES], ["x"])

    def _call(self, i: int, n: int, where: Sequence[Any]) -> Call:
        whole = super()._call(i, n, where)
        x, keys, values, *heads = whole.results
        layer, *others = whole.arguments
        return Call(whole.dealt, [_first(layer), *others], [x, keys, values, _MASK, *heads], whole.publics)

    def layer_program(self, n: int, kind: SparsePlan) -> DealtProgram:
        x, cache, where = self._layer_inputs(n)
        following = self._following(self._kinds.index(kind), slots=True)
        active = Slot((n, kind.heads), np.int64, public=True)
        slots = _first(self._layer_slots[kind]), following, x, cache, active, *where
        keeps = (None, cache.keys.raw, cache.values.raw, None, *([] if following is None else [None]))
        name = f"attention {list(self._layer_slots).index(kind)}"
        return self._compiled(
            (name, n, where[0].mask.shape), lambda: self.assisted.compile(name, partial(gated_attention, kind), slots, keeps)
        )

    def _ffn_program(self, n: int, kind: SparsePlan, size: int) -> DealtProgram:
        """The feed-forward half of a layer of a kind for n tokens and `size` blocks each."""
        name = f"ffn {list(self._layer_slots).index(kind)}, {size} blocks"
        x, index = self._layer_inputs(n)[0], Slot((n, size), np.int64, public=True)
        slots = _second(self._layer_slots[kind]), x, index
        return self._compiled((name, n), lambda: self.assisted.compile(name, partial(sparse_ffn, kind), slots, (None,)))


def _first(params: SparseParams) -> SparseParams:
    """What the first half takes."""
    neurons = params.neurons._replace(up=None, down=None, up_bias=None)
    return params._replace(neurons=neurons, ffn_phi=None, down_bias=None)


def _second(params: SparseParams) -> SparseParams:
    """What the second half takes."""
    neurons = params.neurons._replace(order=None)
    found = {name: getattr(params, name) for name in ("ffn_phi", "down_bias")}
    return SparseParams(**{**dict.fromkeys(SparseParams._fields), **found, "neurons": neurons})
