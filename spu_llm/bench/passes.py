"""What a pass costs by the number of its positions: the whole model, all logits, after the same context."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ..generation import AssistedDecoder
from ..models import Checkpoint
from ..models.calibration_file import calibration_for
from ..models.source import ModelConfig
from ..network import NetworkProfile
from ..progress import Progress, silent
from ..runtime import Phase, ProtocolConfig, Session
from ..runtime.assisted import TRUST, offline


def bench_passes(
    model: ModelConfig,
    checkpoint: Checkpoint,
    text: Sequence[int],
    positions: Sequence[int],
    networks: Sequence[NetworkProfile],
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row for each of `positions`: median seconds of compute after one pass that warms up, what one party sends, what is dealt,
    seconds modelled on the networks, all also as multiples of the first row's.

    The passes take `text` [at least the most positions], each after the tokens before the last of these.
    """
    context, tokens = list(text[: -max(positions)]), list(text[-max(positions) :])
    calibration, ranges = calibration_for(model, checkpoint, progress)
    with Session(ProtocolConfig()) as session:
        decoder = AssistedDecoder(session, checkpoint.decoder, calibration, len(model.prefix) + len(text), model.prefix, ranges)
        decoder.set_up(len(context), progress, positions)
        decoder.advance(context)
        rows = [_row(decoder, tokens[:count], networks, repeats, progress) for count in positions]
    for row in rows:
        row["growth"] = {key: row[key] / rows[0][key] for key in ("seconds", *(profile.name for profile in networks))}
    return {"model": model.name, "context": len(model.prefix) + len(context), "rows": rows, "trust": TRUST}


def _row(
    decoder: AssistedDecoder, tokens: list[int], networks: Sequence[NetworkProfile], repeats: int, progress: Progress
) -> dict[str, Any]:
    session, start, seconds, dealing = decoder.session, decoder.length, [], []
    for i in progress(range(repeats + 1), f"passes of {len(tokens)}", "pass"):
        session.phases.pop("pass", None), session.phases.pop(offline("pass"), None)
        with session.phase("pass") as phase:
            decoder.score(tokens)
        decoder.roll_back(start)
        if i:
            seconds.append(phase.seconds)
            dealing.append(session.phases[offline("pass")].seconds)
    typical = Phase(median(seconds), phase.sent)
    return {
        "positions": len(tokens),
        "seconds": typical.seconds,
        "messages": typical.messages,
        "bytes": typical.bytes,
        "dealer_bytes": session.phases[offline("pass")].bytes,
        "dealer_seconds": median(dealing),
        "operations": {name: cost.seconds for name, cost in sorted(phase.ops.items(), key=lambda item: -item[1].seconds)[:8]},
        **{each.name: each.seconds(typical.seconds, typical.messages, typical.bytes) for each in networks},
    }
