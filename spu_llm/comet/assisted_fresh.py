"""Sparse decoding with a dealer and a fresh secret order of neurons for every token, by which nothing is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..generation.assisted import AssistedDecoder
from ..models.fixed_block import BlockParams, encode_layer, with_reference
from ..models.folded import fold_layer
from ..primitives.fixed import Fixed
from ..progress import Progress
from ..runtime import Slot
from ..runtime.assisted import OperandSlot
from .activity import refuse_family
from .encoded import Part, in_order, score_parts, with_predictors
from .fixed_fresh import FreshParams, FreshPlan, fresh_block
from .gate import above, in_format
from .prepared import LayerSparsity


class FreshAssistedDecoder(AssistedDecoder):
    """An OPT decoder that computes the blocks of neurons that `sparsity` predicts, in a fresh secret order for every token.

    What each party learns beyond `AssistedDecoder`'s: nothing. The places of active blocks, which both see, are a uniform choice of
    a constant number (docs/leakage.md).
    """

    def __init__(self, *args: Any, sparsity: Sequence[LayerSparsity], **kwargs: Any):
        super().__init__(*args, **kwargs)
        refuse_family(self.decoder.config)
        self._sparsity = in_format(self.decoder, sparsity)

    def _mask_layers(self, progress: Progress) -> None:
        config, learned = self.decoder.config, self._calibration.reference == "learned"
        for i in progress(range(config.layers), "masking weights", "layer"):
            tables, sparsity = self.plan.blocks[i], self._sparsity[i]
            folded = fold_layer(config, with_predictors(self.decoder.params["layers"][i], sparsity, None))
            if learned:
                folded = with_reference(folded, self._calibration.references[i])
            dense = in_order(encode_layer(folded, tables.norm, self.plan.phis[i]), sparsity.order)
            placed = {field: self._place(f"layers.{i}.{field}", value) for field, value in dense._asdict().items()}
            operands = {"up_bias": dense.up_bias, "second": score_parts(sparsity.neurons)["second"]}
            placed |= {name: self._operand_of(f"layers.{i}.{name}", value) for name, value in operands.items()}
            bias = score_parts(above(sparsity))["second_bias"]
            self.session.share(f"layers.{i}.second_bias", bias.raw, "owner")
            placed["second_bias"] = Fixed(f"layers.{i}.second_bias", bias.bits), Fixed(Slot(bias.raw.shape, np.int64), bias.bits)
            names, slots = ({field: pair[at] for field, pair in placed.items()} for at in (0, 1))
            kind = FreshPlan(tables, sparsity.active_blocks)
            self._layers.append(_fresh(names))
            self._kinds.append(kind)
            self._layer_slots[kind] = _fresh(slots)

    def _operand_of(self, name: str, value: Fixed | Part) -> tuple[Fixed, Fixed]:
        operand = self.assisted.mask_operand(name, value.raw, "owner")
        return Fixed(operand, value.bits), Fixed(OperandSlot(name.rsplit(".", 1)[-1], value.raw.shape), value.bits)

    def _layer_function(self, kind: FreshPlan) -> Callable:
        return partial(fresh_block, self.decoder.config, kind)


def _fresh(parts: dict[str, Any]) -> FreshParams:
    dense = BlockParams(**{field: parts[field] for field in BlockParams._fields})
    return FreshParams(dense, parts["second"], parts["second_bias"])
