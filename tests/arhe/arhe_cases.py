"""Shapes that hypothesis draws, and a schedule replayed without the code that placed it."""

from functools import cache

import numpy as np
from hypothesis import strategies as st

from spu_llm.arhe import CkksParameters, Degrees, Meaning, Options, build_program, place
from spu_llm.arhe.executor import Server
from spu_llm.arhe.graph import START
from spu_llm.arhe.shapes import random_decoder
from spu_llm.models import DecoderConfig


@st.composite
def decoders(draw, largest=6):
    """GPT-2 and Llama shapes, odd ones among them."""
    family = draw(st.sampled_from(["gpt2", "llama"]))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * (draw(st.integers(1, 3)) if family == "llama" else 1)
    return DecoderConfig(
        family,
        draw(st.integers(1, 10**largest)),
        heads * 2 * draw(st.integers(1, 2 ** (largest + 1))),
        draw(st.integers(1, 3)),
        heads,
        kv_heads,
        draw(st.integers(1, 10 ** min(largest, 4))),
        2048,
        1e-5,
        draw(st.booleans()),
        rope_base=10000.0 if family == "llama" else None,
    )


options = st.builds(Options, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["tournament", "league", "cutmax"]))
parameters = st.builds(
    lambda log_ring, levels, reserve: CkksParameters(log_ring=log_ring, levels=levels + reserve, reserve=reserve),
    st.integers(4, 17),
    st.integers(7, 16),
    st.integers(0, 1),
)
degrees = st.builds(
    Degrees,
    inverse_root=st.sampled_from([5, 27, 59, 119]),
    exponential=st.sampled_from([5, 13]),
    squarings=st.integers(0, 3),
    reciprocal=st.sampled_from([13, 59, 119]),
    activation=st.sampled_from([13, 27, 59]),
    steep=st.integers(1, 4),
    flat=st.integers(0, 2),
    cuts=st.sampled_from([(), (4,), (4, 4)]),
    shares=st.sampled_from([(3,), (5, 2)]),
    cut_factor=st.sampled_from([13, 27]),
    cut_steep=st.integers(1, 2),
)


def scheduled(config, parameters, degrees, options):
    return place(build_program(config, degrees, options, parameters.slots), parameters)


def replayed(schedule, refreshes):
    """Levels that the refreshes leave each value at when it is made; fails below the reserve, and for a stored value refreshed."""
    parameters, program = schedule.parameters, schedule.program
    now = {START: schedule.levels[START]}
    made = dict(now)
    for number, op in enumerate(program.ops):
        for refresh in refreshes:
            if refresh.before == number:
                assert now[refresh.value] == refresh.level >= parameters.reserve
                assert refresh.value not in program.stored
                now[refresh.value] = parameters.levels
        now[op.output] = made[op.output] = min(now[value] for value in op.inputs) - op.depth
        assert made[op.output] >= (parameters.reserve if op.depth else 0), op.name
    return made


weights = cache(random_decoder)


def argmax_of(schedule, ranges, backend, logits):
    """What the argmax of a schedule makes of logits [vocabulary], on a backend: the one-hot vector, nearly; and its bootstraps."""
    server = Server(Meaning(weights(schedule.program.config), schedule.program, ranges), schedule, backend)
    server.state.prompt = 1
    server.done = 1 + next(i for i, op in enumerate(schedule.program.ops) if op.output == "logits")
    written = np.full(schedule.program.candidates, ranges.beyond)
    written[: len(logits)] = (logits - ranges.zero) / ranges.unit
    slots = schedule.parameters.slots
    fresh = [backend.encrypt(written[begun : begun + slots]) for begun in range(0, len(written), slots)]
    server.values = {"logits": [backend.lower(x, schedule.levels["logits"]) for x in fresh]}
    before = backend.bootstraps
    found = np.concatenate([backend.decrypt(x) for x in server.step()])
    return found[: len(logits)], backend.bootstraps - before
