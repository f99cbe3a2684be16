"""Every bootstrap's place against a replay, the formula against the count, the rule against the cheapest placement."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil

import pytest
from arhe_cases import decoders, degrees, options, parameters, replayed, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.arhe import PAPER, CkksParameters, Degrees, Options, orion
from spu_llm.arhe.graph import END, START, Layout, Op, Program, Span, build_program
from spu_llm.arhe.report import planned
from spu_llm.arhe.schedule import place, prompt_span, step_span
from spu_llm.arhe.shapes import SHAPES
from spu_llm.errors import UserError

contexts = st.integers(1, 600)
few = settings(max_examples=25, deadline=None)


@few
@given(decoders(), parameters, degrees, options)
def test_levels_never_fall_below_the_reserve_and_a_step_can_follow_a_step(config, parameters, degrees, options):
    schedule = scheduled(config, parameters, degrees, options)
    levels = replayed(schedule, schedule.refreshes)
    assert levels == schedule.levels
    assert levels[END] >= levels[START]


@few
@given(decoders(), parameters, degrees, options)
def test_no_refresh_can_be_left_out(config, parameters, degrees, options):
    schedule = scheduled(config, parameters, degrees, options)
    for left_out in schedule.refreshes:
        fewer = [other for other in schedule.refreshes if other is not left_out]
        with pytest.raises(AssertionError):
            levels = replayed(schedule, fewer)
            assert levels[END] >= levels[START]


@few
@given(decoders(), parameters, degrees, options, contexts)
def test_no_optimisation_adds_a_bootstrap(config, parameters, degrees, options, context):
    for name in ("skip", "pack", "cache"):
        off, on = (scheduled(config, parameters, degrees, replace(options, **{name: value})) for value in (False, True))
        for span in (step_span, prompt_span):
            assert on.bootstraps(span(on, context)) <= off.bootstraps(span(off, context)), name


@few
@given(decoders(), parameters, degrees, options, contexts)
def test_more_context_never_takes_fewer_bootstraps(config, parameters, degrees, options, context):
    schedule = scheduled(config, parameters, degrees, options)
    counts = [schedule.bootstraps(step_span(schedule, t)) for t in (context, context + 1, 2 * context + 1)]
    assert all(a <= b for a, b in pairwise(counts))


@few
@given(decoders(), parameters, degrees, options, contexts, st.integers(0, 600))
def test_formula_is_the_count(config, parameters, degrees, options, new, past):
    schedule = scheduled(config, parameters, degrees, replace(options, pack=True))
    span = Span(new, past, schedule.program.options)
    pairs = sum(range(past + 1, past + new + 1)) if options.skip else new * (past + new)
    text = re.sub(r"(\d) (new|pairs|context|ceil)", r"\1 * \2", schedule.formula())
    assert eval(text, {"ceil": ceil, "new": new, "pairs": pairs, "context": past + new}) == schedule.bootstraps(span)


@settings(max_examples=15, deadline=None)
@given(decoders(), parameters, degrees, options, contexts)
def test_cheapest_placement_is_valid_and_no_dearer_than_the_rule(config, parameters, degrees, options, context):
    schedule = scheduled(config, parameters, degrees, options)
    span = step_span(schedule, context)
    refreshes = orion.shortest(schedule, span)
    levels = replayed(schedule, refreshes)
    assert levels[END] >= levels[START]
    assert orion.cost(schedule.program, refreshes, span, parameters.slots) <= schedule.bootstraps(span)


@st.composite
def small_programs(draw):
    """A few operations on values of one to three ciphertexts, each on one or two values before it."""
    program = Program(SHAPES["gpt2-tiny"], Degrees(), Options(), 1)
    names = [START, *(f"value{i}" for i in range(draw(st.integers(0, 3)))), END]
    program.layouts = {name: Layout(1, draw(st.integers(1, 3)), single=True) for name in names}
    for i, name in enumerate(names[1:], 1):
        inputs = tuple(draw(st.lists(st.sampled_from(names[:i]), min_size=1, max_size=2, unique=True)))
        block = draw(st.sampled_from(["", "same"])) or name
        program.ops.append(Op(name, "product", inputs, name, draw(st.integers(0, 3)), block))
    return program


@settings(max_examples=40, deadline=None)
@given(small_programs(), st.integers(3, 5), st.integers(0, 1))
def test_cheapest_placement_against_every_placement(program, levels, reserve):
    parameters = CkksParameters(log_ring=4, slots=1, levels=levels + reserve, reserve=reserve)
    schedule, span = place(program, parameters), Span(1, 0, program.options)
    replayed(schedule, schedule.refreshes)
    places = [(number, value) for number, op in enumerate(program.ops) for value in op.inputs]
    subsets = (chosen for size in range(len(places) + 1) for chosen in combinations(places, size))
    prices = [sum(program.layouts[value].size for _, value in chosen) for chosen in subsets if _possible(schedule, chosen)]
    assert orion.cost(program, orion.shortest(schedule, span), span, 1) == min(prices)


def _possible(schedule, chosen):
    """Whether bootstraps at these places keep every level at the reserve or above."""
    parameters, now = schedule.parameters, {START: schedule.levels[START]}
    for number, op in enumerate(schedule.program.ops):
        for before, value in chosen:
            if before == number:
                if now[value] < parameters.reserve:
                    return False
                now[value] = parameters.levels
        now[op.output] = min(now[value] for value in op.inputs) - op.depth
        if now[op.output] < (parameters.reserve if op.depth else 0):
            return False
    return now[END] >= schedule.levels[START]


@pytest.mark.parametrize("steep", [2, 3])
@pytest.mark.parametrize("levels", [7, 10])
def test_gpt2_small_stays_far_below_the_papers_count(levels, steep):
    parameters = replace(PAPER, levels=levels)
    found = planned(SHAPES["gpt2-small"], parameters, Degrees(steep=steep), Options(), 33)
    assert found["bootstraps_step"] < 1072 / 5
    assert found["shortest_path"]["bootstraps_step"] <= found["bootstraps_step"] <= 1.15 * found["shortest_path"]["bootstraps_step"]
    ladder = [rung["bootstraps_step"] for name, rung in found["ladder"].items() if not name.startswith("without")]
    assert all(a >= b for a, b in pairwise(ladder))
    assert sum(found["step_by_part"].values()) == found["bootstraps_step"]


def test_paper_parameters_have_the_papers_modulus():
    assert PAPER.ring == 2**16 and PAPER.slots == 2**15 and PAPER.hamming_weight == 192
    assert abs(PAPER.modulus_bits - 1465) <= 1


@pytest.mark.parametrize(
    "wrong, names",
    [
        (lambda: CkksParameters(levels=0), "levels"),
        (lambda: CkksParameters(log_ring=3), "ring"),
        (lambda: CkksParameters(slots=3), "slots"),
        (lambda: CkksParameters(scale_bits=55), "scale"),
        (lambda: Degrees(reciprocal=1000), "degree 1000"),
        (lambda: Degrees(steep=0, flat=0), "sign"),
        (lambda: scheduled(SHAPES["gpt2-tiny"], CkksParameters(levels=4), Degrees(), Options()), "takes"),
        (lambda: planned(SHAPES["gpt2-tiny"], PAPER, Degrees(), Options(), 257), "context 257"),
        (lambda: build_program(replace(SHAPES["gpt2-tiny"], family="opt"), Degrees(), Options(), 8), "family opt"),
    ],
)
def test_errors_name_the_value(wrong, names):
    with pytest.raises(UserError, match=names):
        wrong()


def test_plan_of_an_unscheduled_program_is_refused_by_name():
    program = build_program(SHAPES["llama-tiny"], Degrees(reciprocal=119), Options(), 64)
    with pytest.raises(UserError, match="reciprocal takes 7 levels"):
        place(program, CkksParameters(levels=6))
