"""Text on the SPU device of alice, who has a prompt, and bob, who has a model; carol deals.

JAX_ENABLE_X64=1 python secretflow_generation_party.py ADDRESS PORT CHECKPOINT OUT

ADDRESS is that of a Ray cluster with a node a party, whose driver this process is. In production mode secretflow_party.py runs it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import secretflow as sf

from spu_llm.models import load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.secretflow import OwnerModel, SecretFlowDecoder

PARTIES = ("alice", "bob", "carol")
PREFIX = (7, 8)
PROMPTS = ([5, 17, 96], [40])
NEW = 3


def load(folder: str) -> OwnerModel:
    """What bob has: its checkpoint, calibrated on sequences of random tokens."""
    decoder = load_checkpoint(Path(folder)).decoder
    random = np.random.default_rng(0)
    texts = [random.integers(0, decoder.config.vocabulary, length).tolist() for length in [18] * 20 + [2] * 20]
    return OwnerModel(decoder, calibrate(decoder, texts, PREFIX), PREFIX)


def save(steps: list, out: str) -> None:
    """What alice got: [(token, logits), ...] of each prompt."""
    Path(out).write_text(json.dumps([[(step.token, step.logits.tolist()) for step in each] for each in steps]))


def make_device(port: int) -> sf.SPU:
    nodes = [{"party": each, "address": f"127.0.0.1:{port + 10 + i}"} for i, each in enumerate(PARTIES[:2])]
    return sf.SPU({"nodes": nodes, "runtime_config": {"protocol": "SEMI2K", "field": "FM64"}})


def run_generation(device: sf.SPU, folder: str, out: str) -> None:
    alice, bob, carol = map(sf.PYU, PARTIES)
    with SecretFlowDecoder(device, alice, bob, carol, bob(load)(folder), capacity=20) as decoder:
        found = [list(decoder.generate(alice(np.asarray)(prompt), NEW)) for prompt in PROMPTS]
        decoder.roll_back()
        found.append(list(decoder.generate(alice(np.asarray)(PROMPTS[0]), NEW)))
        sf.wait(alice(save)(found, out))


if __name__ == "__main__":
    sf.init(list(PARTIES), address=sys.argv[1])
    run_generation(make_device(int(sys.argv[2])), *sys.argv[3:])
    sf.shutdown()
