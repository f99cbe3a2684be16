"""The plan tried on text before anything is shared: the fixed-point layers in plaintext, every bound watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..errors import UserError
from ..primitives.attention import Place, RowCache
from ..primitives.fixed import Fixed, encode
from ..primitives.observe import observe, spare_bits
from ..progress import Progress, silent
from .cache import window
from .calibration import Calibration
from .decoder import Decoder
from .fixed_block import BITS, STREAM_BITS, block, conformant_columns, encode_angles, encode_layer, with_reference
from .folded import centred_rows, fold_layer
from .plain import PlainDecoder
from .plan import ModelPlan


@dataclass(frozen=True)
class RangeReport:
    """How the plan fared: `values` that have a bound were seen, `outside` of them beyond it.

    `bound` is the 95% upper bound on the share of values outside: 3 / values where none was (the rule of three).
    `tightest` names the site that came nearest to its bound, and the bits to spare there.
    """

    values: int
    outside: int
    tightest: str
    spare_bits: float

    @property
    def bound(self) -> float:
        return 3.0 / self.values if not self.outside else min(1.0, (self.outside + 2 * self.outside**0.5 + 3) / self.values)


def check_plan(
    decoder: Decoder,
    calibration: Calibration,
    plan: ModelPlan,
    text: Sequence[int],
    prefix: Sequence[int],
    progress: Progress = silent,
) -> RangeReport:
    """Run one text through all layers in plaintext fixed point. Raises UserError naming the first site that a value leaves."""
    config, n, start = decoder.config, len(text), len(prefix)
    plain = PlainDecoder(decoder, start + n)
    if prefix:
        plain.advance(prefix)
    place = window(config, start, n, start + n)
    x = _embedded(decoder, text, start)
    values = outside = 0
    tightest = (64.0, "")
    layers = list(zip(decoder.params["layers"], plan.blocks, plan.phis, calibration.references, plain.cache, strict=True))
    for i, (params, tables, phis, reference, rows) in enumerate(progress(layers, "checking ranges", "layer")):
        folded = fold_layer(config, params)
        learned = calibration.reference == "learned"
        encoded = encode_layer(with_reference(folded, reference) if learned else folded, tables.norm, phis)
        cache = RowCache(*(Fixed(encode(part, BITS), BITS) for part in rows))
        columns = conformant_columns(start, start, n) if calibration.reference == "maxima" else None
        where = Place(np.int64(start), place.mask.astype(np.int64), columns), encode_angles(place.cos, place.sin, start)
        (x, _), sites = observe(partial(block, config, tables), encoded, x, cache, *where)
        for number, site in enumerate(sites):
            name = f"layer {i}, {site.kind} {number}"
            if site.outside:
                raise UserError(
                    f"{name}: {site.outside} of {site.values} values on the calibration text leave its bound "
                    f"(the largest is {site.used:.2f} of it); "
                    "give the model a prefix that takes its outliers, or more calibration text"
                )
            values, outside = values + site.values, outside + site.outside
            tightest = min(tightest, (spare_bits(site), name))
    return RangeReport(values, outside, tightest[1], tightest[0])


def _embedded(decoder: Decoder, text: Sequence[int], start: int) -> Fixed:
    embed = decoder.params["embed"]
    x = centred_rows(decoder.config, embed["table"])[np.asarray(text)]
    if "positions" in embed:
        x = x + centred_rows(decoder.config, embed["positions"])[start : start + len(text)]
    return Fixed(encode(x, STREAM_BITS), STREAM_BITS)
