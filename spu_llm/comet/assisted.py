"""Sparse decoding with a dealer: as `AssistedDecoder`, with heads and blocks of neurons in secret orders renewed every few tokens.

Renewing permutes the opened weights, and the cache's heads, under permutations that the dealer alone knows, and opens the result
under new masks: 8 bytes a weight (and a number of the cache) from each party in one message a layer and kind, and as many from the
dealer to one of them. It needs no input, and is booked to a phase of its own, `shuffle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..generation.assisted import AssistedDecoder
from ..models.fixed_block import encode_layer, with_reference
from ..models.folded import fold_layer
from ..primitives.attention import RowCache
from ..primitives.fixed import Fixed
from ..primitives.permute import permutation, permute
from ..primitives.rows import seal
from ..progress import Progress, silent
from ..runtime import Slot
from ..runtime.assisted import Call, DealtProgram, OperandName, OperandSlot
from .activity import refuse_family
from .encoded import Part, encoded_layer, with_predictors
from .fixed_sparse import Heads, Neurons, SparseParams, SparsePlan, sparse_block
from .gate import in_format
from .prepared import LayerSparsity, LowRank
from .renewal import SHUFFLE, Renewing, active_heads

_PLAIN = ("query_bias", "key_value_bias", "slopes", "second_bias", "up_bias")
"""Parts that are plain shares; the others are masked operands."""


class SparseAssistedDecoder(Renewing, AssistedDecoder):
    """An OPT decoder that computes the heads and blocks of neurons that `sparsity` predicts, in new orders every `renew` tokens.

    What each party learns beyond `AssistedDecoder`'s: in every layer, for every token, which heads and which blocks are active,
    named by their places in the present secret order; how many is constant. The dealer learns when orders are renewed
    (docs/leakage.md).
    """

    def __init__(self, *args: Any, sparsity: Sequence[LayerSparsity], renew: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        refuse_family(self.decoder.config)
        self._sparsity = in_format(self.decoder, sparsity)
        self.renew_after = renew
        self._shuffled: list[dict[str, dict[str, Part]]] = []

    def renew(self, progress: Progress = silent) -> None:
        """Put heads and blocks of every layer into new secret orders."""
        self._since = 0
        with self.session.phase(SHUFFLE):
            calls = [self._shuffle(i, kind) for i in range(len(self._layers)) for kind in ("heads", "neurons")]
            for call in progress(calls, "shuffling", "part"):
                self.assisted.run_all([call])

    def place_weights(self, progress: Progress = silent) -> None:
        super().place_weights(progress)
        self.renew(progress)

    def embed(self, tokens: list[int]) -> None:
        self._count(len(tokens))
        super().embed(tokens)

    def run_layers(self, n: int) -> None:
        every = np.broadcast_to(np.arange(self.decoder.config.heads), (n, self.decoder.config.heads))
        self.session.publish(active_heads(None), every)
        super().run_layers(n)

    # Set-up

    def _mask_layers(self, progress: Progress) -> None:
        config, learned = self.decoder.config, self._calibration.reference == "learned"
        self._shuffled = []
        for i in progress(range(config.layers), "masking weights", "layer"):
            tables, sparsity = self.plan.blocks[i], self._sparsity[i]
            folded = fold_layer(config, with_predictors(self.decoder.params["layers"][i], sparsity, self._next(i)))
            if learned:
                folded = with_reference(folded, self._calibration.references[i])
            encoded = encoded_layer(config.head_width, encode_layer(folded, tables.norm, self.plan.phis[i]), sparsity, learned)
            self._shuffled.append({"heads": encoded.heads, "neurons": encoded.neurons})
            for kind, parts in self._shuffled[-1].items():
                for name, part in parts.items():
                    self._share_part(f"{kind}.{i}.{name}", name, part)
            rest = {field: self._place(f"layers.{i}.{field}", value) for field, value in encoded.rest.items()}
            names, slots = ({field: pair[at] for field, pair in rest.items()} for at in (0, 1))
            self._layers.append(SparseParams(*self._groups(i, False), **names))
            plan = SparsePlan(tables, sparsity.active_heads, sparsity.active_blocks, self._next_heads(i))
            self._kinds.append(plan)
            self._layer_slots[plan] = SparseParams(*self._groups(i, True), **slots)

    def _share_part(self, name: str, part: str, value: Part) -> None:
        if part in _PLAIN:
            self.session.share(name, value.raw, "owner")
        else:
            self.assisted.mask_operand(name, value.raw, "owner")

    def _groups(self, i: int, slots: bool) -> tuple[Heads, Neurons]:
        """Layer i's parts that are shuffled: their slots, or their names."""
        make: Any = _slot if slots else partial(_name, i)
        heads, neurons = (
            {name: make(kind, name, part) for name, part in parts.items()} for kind, parts in self._shuffled[i].items()
        )
        heads |= {"second": None, "second_bias": None}  # for the layer before: layers that differ by them only share programs
        every: dict[str, Any] = {field: heads.get(field) for field in Heads._fields}
        return Heads(**every), Neurons(**neurons)

    def _next(self, i: int) -> LowRank | None:
        """What layer i predicts of the next layer's heads with, if it does."""
        return self._sparsity[i + 1].heads if i + 1 < len(self._sparsity) else None

    def _next_heads(self, i: int) -> int | None:
        return None if self._next(i) is None else self._sparsity[i + 1].active_heads

    # Programs

    def _call(self, i: int, n: int, where: Sequence[Any]) -> Call:
        cache, following = self._cache[i], self._following(i, slots=False)
        active = active_heads(None if self._sparsity[i].heads is None else i)
        arguments = [self._layers[i], following, "x", cache, active, *where]
        results = ["x", cache.keys.raw, cache.values.raw, *([] if following is None else [active_heads(i + 1)])]
        return Call(self.layer_program(n, self._kinds[i]), arguments, results, {"start": self.rows.written})

    def _following(self, i: int, slots: bool) -> tuple[Fixed, Fixed] | None:
        """The second product of the next layer's heads and its bias: their slots, or their names."""
        if self._next(i) is None:
            return None
        parts = self._shuffled[i + 1]["heads"]
        pair = [("second", "following"), ("second_bias", "following_bias")]
        return tuple(  # type: ignore[return-value]
            _slot("heads", alias, parts[name]) if slots else _name(i + 1, "heads", name, parts[name]) for name, alias in pair
        )

    def layer_program(self, n: int, kind: SparsePlan) -> DealtProgram:
        x, cache, where = self._layer_inputs(n)
        following = self._following(self._kinds.index(kind), slots=True)
        active = Slot((n, kind.heads), np.int64, public=True)
        slots = self._layer_slots[kind], following, x, cache, active, *where
        keeps = (None, cache.keys.raw, cache.values.raw, *([] if following is None else [None]))
        run, name = partial(sparse_block, self.decoder.config, kind), f"layer {list(self._layer_slots).index(kind)}"
        return self._compiled((name, n, where[0].mask.shape), lambda: self.assisted.compile(name, run, slots, keeps))

    def _shuffle(self, i: int, kind: str) -> Call:
        parts = self._shuffled[i][kind]
        names = {name: _name(i, kind, name, part) for name, part in parts.items()}
        cache = self._cache[i] if kind == "heads" else None
        results = [*(name.raw for name in names.values()), *([] if cache is None else [cache.keys.raw, cache.values.raw])]
        return Call(self._shuffle_program(parts, kind), [names, cache], results, {})

    def _shuffle_program(self, parts: dict[str, Part], kind: str) -> DealtProgram:
        cache = self._layer_inputs(1)[1] if kind == "heads" else None
        slots = {name: _slot(kind, name, part) for name, part in parts.items()}
        first = next(iter(parts.values()))

        def shuffle(values: dict[str, Fixed], cache: RowCache | None) -> list[Any]:
            order = permutation(first.raw.shape[first.axis])
            moved = {name: permute(order, values[name], part.axis) for name, part in parts.items()}
            rows = [] if cache is None else [seal(permute(order, each, axis=1)) for each in cache]
            return [*((value if name in _PLAIN else seal(value)).raw for name, value in moved.items()), *(row.raw for row in rows)]

        keeps = [None if name in _PLAIN else OperandSlot(f"new {name}", part.raw.shape) for name, part in parts.items()]
        keeps += [] if cache is None else [cache.keys.raw, cache.values.raw]
        shapes = tuple((name, part.raw.shape) for name, part in parts.items())
        return self._compiled(
            (SHUFFLE, shapes), lambda: self.assisted.compile(f"{SHUFFLE} {kind}", shuffle, (slots, cache), tuple(keeps))
        )


def _name(i: int, kind: str, name: str, part: Part) -> Fixed:
    variable = f"{kind}.{i}.{name}"
    return Fixed(variable if name in _PLAIN else OperandName(variable), part.bits)


def _slot(kind: str, name: str, part: Part) -> Fixed:
    shape = part.raw.shape
    plain = name.endswith("bias") or name in _PLAIN
    return Fixed(Slot(shape, np.int64) if plain else OperandSlot(f"{kind} {name}", shape), part.bits)
