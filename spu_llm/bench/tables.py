"""Which tables a model's measured ranges choose, layer by layer, and what that saves."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce
from typing import Any

from ..models.calibration import Calibration
from ..models.config import DecoderConfig
from ..models.plan import dealer_bytes, expanded_words, plan_model, plan_of, widest
from ..models.table_sizes import TableSizes


def bench_tables(config: DecoderConfig, calibration: Calibration, context: int) -> dict[str, Any]:
    """Key bytes to each party and words to expand for one token at `context` cached positions, in all layers.

    `layers` are the tables in use; `each`: every layer with its own, however many programs that takes; `joined`: one set of
    tables that serves all layers; `widest`: the largest tables there are, which need no ranges.
    """
    plan = plan_model(config, calibration)
    alone = plan_model(config, calibration, programs=config.layers)
    joined = reduce(TableSizes.joined, plan.sizes)
    sets = {
        "layers": plan.sizes,
        "each": alone.sizes,
        "joined": (joined,) * config.layers,
        "widest": (widest(config),) * config.layers,
    }
    return {
        "context": context,
        "programs": len(set(plan.sizes)),
        "sizes": [asdict(sizes) for sizes in plan.sizes],
        **{
            name: {
                "key_bytes": sum(dealer_bytes(config, plan_of(config, each), context) for each in sizes),
                "words": sum(expanded_words(config, plan_of(config, each), context) for each in sizes),
            }
            for name, sizes in sets.items()
        },
    }
