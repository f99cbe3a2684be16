"""What a run cost and how near it came to plaintext, as metrics.json has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..generation import AssistedDecoder, SecureDecoder, Step
from ..models import Decoder, PlainDecoder
from ..models.plan_check import RangeReport
from ..network import NetworkProfile
from ..runtime import Phase
from ..runtime.assisted import offline
from .schema import Experiment

SCHEMA = 1


def collect(
    experiment: Experiment,
    secure: SecureDecoder | AssistedDecoder,
    phases: Mapping[str, Phase],
    prompt: Sequence[int],
    steps: Sequence[Step],
    mode: str | None = None,
) -> dict[str, Any]:
    """The metrics of a generation, but for its text and accuracy.

    `mode` stands for the network's: in `link`, and in `measured` between machines, seconds have the network in them already.
    """
    network, mode = experiment.network, mode or experiment.network.mode
    setup, prefill, decode = (phases.get(name, Phase()) for name in ("setup", "prefill", "decode"))
    dealt = phases.get(offline("decode"), Phase())
    passes = max(1, len(steps) - 1)

    def seconds(phase: Phase) -> float:
        return seconds_on(network, phase, mode)

    def cost(phase: Phase) -> dict[str, Any]:
        return {"seconds": seconds(phase), "compute_seconds": phase.seconds, "bytes": phase.bytes, "messages": phase.messages}

    return {
        "schema": SCHEMA,
        "model": experiment.model.name,
        "protocol": experiment.protocol.name,
        "ring": experiment.protocol.ring,
        "fraction_bits": experiment.protocol.fraction_bits,
        "ops": experiment.ops,
        "trust": secure.trust,
        "network": {
            "name": network.name,
            "bandwidth_mbps": network.bandwidth_mbps,
            "delay_ms": network.delay_ms,
            "mode": mode,
        },
        "prompt": experiment.generation.prompt,
        "text": "",
        "tokens": [step.token for step in steps],
        "setup": cost(setup),
        "prefill": {"tokens": len(prompt), **cost(prefill)},
        "decode": {
            "tokens": max(0, len(steps) - 1),
            "seconds_per_token": seconds(decode) / passes,
            "compute_seconds_per_token": decode.seconds / passes,
            "bytes_per_token": decode.bytes / passes,
            "messages_per_token": decode.messages / passes,
        },
        "operations": {
            name: {
                op: vars(cost) for op, cost in sorted(phase.ops.items(), key=lambda item: -item[1].seconds) if cost.seconds > 1e-3
            }
            for name, phase in (("setup", setup), ("prefill", prefill), ("decode", decode))
        },
        # stock SPU has no offline phase: its triples are made inside the online programs and counted there
        "offline": {"bytes_per_token": dealt.bytes / passes, "seconds_per_token": dealt.seconds / passes},
        "failure_probability_per_token": secure.failure_probability,
        "ranges": ranges_of(secure.ranges if isinstance(secure, AssistedDecoder) else None),
    }


def seconds_on(network: NetworkProfile, phase: Phase, mode: str | None = None) -> float:
    """Of a phase on the network; where that was there, as the `mode` says, they are what was measured."""
    if (mode or network.mode) in ("link", "measured"):
        return phase.seconds
    return network.seconds(phase.seconds, phase.messages, phase.bytes)


def ranges_of(report: RangeReport | None) -> dict[str, Any] | None:
    """How the plugin's tables and truncations fared on the calibration text; stock SPU has no such bounds."""
    return None if report is None else {**asdict(report), "outside_share_at_most": report.bound}


def accuracy(decoder: Decoder, before: Sequence[int], tokens: Sequence[int], logits: Sequence[np.ndarray | None]) -> dict[str, Any]:
    """Compare the logits that the client got, after `before` and each of `tokens` but the last, with plaintext float32 decoding."""
    fed = [*before, *tokens[:-1]]
    known = [i for i, row in enumerate(logits) if row is not None]
    plain = PlainDecoder(decoder, len(fed)).advance(fed)[-len(tokens) :][known]
    secure = np.stack([row for row in logits if row is not None])
    assert plain.shape == secure.shape
    return {
        "max_logit_error": float(np.abs(plain - secure).max()),
        "max_logit": float(np.abs(plain).max()),
        "top1_agreement": float((plain.argmax(-1) == secure.argmax(-1)).mean()),
    }


def reset_peak_memory() -> None:
    """Let the kernel measure the peak from here on, so that a baseline's peak is its own."""
    with suppress(OSError):  # some sandboxes forbid it; the figure is then the peak since the process began
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The largest resident set since the reset, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
