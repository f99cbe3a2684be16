"""The simulator's levels, scales and ranges; polynomials against numpy; whole runs against the float models."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from arhe_cases import decoders, options, scheduled
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev

from spu_llm.arhe import PAPER, CkksParameters, Degrees, Meaning, Options, Simulator, calibrate, decode
from spu_llm.arhe.backend import LevelViolation, RangeViolation, evaluate_series
from spu_llm.arhe.calibrate import exact_logits
from spu_llm.arhe.executor import Server, encrypted
from spu_llm.arhe.graph import build_program
from spu_llm.arhe.polynomials import fit_reciprocal, series_depth, sign_series
from spu_llm.arhe.shapes import SHAPES, random_decoder
from spu_llm.arhe.simulator import Simulated, primes
from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.models import PlainDecoder

SMALL = replace(PAPER, log_ring=10, slots=0)


def texts(config, count=4, length=14, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocabulary, (count, length)).tolist()


@cache
def weights(config):
    return random_decoder(config)


def prepared(config, options=None, parameters=PAPER, degrees=None, margin=1.5):
    """A random decoder, its schedule, and its meaning on calibrated ranges."""
    decoder = weights(config)
    schedule = scheduled(config, parameters, degrees or Degrees(reciprocal=119), options or Options())
    return decoder, schedule, Meaning(decoder, schedule.program, calibrate(decoder, schedule.program, texts(config), margin))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 247), st.integers(0, 2**32 - 1))
def test_series_against_numpy_in_the_levels_it_is_planned_for(degree, seed):
    draw = np.random.default_rng(seed)
    coefficients, x = draw.standard_normal(degree + 1), draw.uniform(-1, 1, 50)
    backend = Simulator(PAPER)
    found = evaluate_series(backend, backend.encrypt(x), coefficients)
    np.testing.assert_allclose(backend.decrypt(found)[:50], chebyshev.chebval(x, coefficients), atol=1e-9 * degree)
    assert PAPER.levels - found.level == (degree).bit_length() <= series_depth(degree)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 10), st.floats(1.01, 1e4), st.sampled_from([13, 27, 59]))
def test_reciprocals_relative_error_is_chebyshevs(low, ratio, degree):
    series = fit_reciprocal(low, low * ratio, degree)
    x = np.geomspace(low, low * ratio, 2001)
    found = chebyshev.chebval((x - series.middle) / series.half, series.coefficients) * x - 1
    rate = (np.sqrt(ratio) + 1) / (np.sqrt(ratio) - 1)
    bound = 2 / (rate ** (degree + 1) + rate ** -(degree + 1))
    np.testing.assert_allclose(np.abs(found).max(), bound, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("steep, flat", [(2, 2), (3, 2), (4, 2)])
def test_sign_stays_in_its_range_and_parts_what_it_resolves(steep, flat):
    signs = sign_series(Degrees(steep=steep, flat=flat))
    value = x = np.linspace(-1, 1, 20001)
    for part in signs:
        value = chebyshev.chebval(value, part)
        assert np.abs(value).max() < 1 + 1e-9
    resolved = np.abs(x) >= Meaning(weights(SHAPES["gpt2-tiny"]), _program(steep, flat)).threshold
    assert np.abs(value - np.sign(x))[resolved].max() < 0.011


def _program(steep, flat):
    return build_program(SHAPES["gpt2-tiny"], Degrees(steep=steep, flat=flat), Options(), 64)


def test_primes_are_prime_and_near_the_scale():
    found = primes(16, 40, 10)
    small = np.arange(2, 2**20 + 2**10)
    for prime in found:
        assert prime % 2**17 == 1 and abs(np.log2(prime) - 40) < 1e-3
        assert np.all(prime % small)
    assert len(set(found)) == 10


def test_simulator_refuses_what_ckks_would_get_wrong():
    backend = Simulator(CkksParameters(levels=3, reserve=1))
    x = backend.encrypt(np.ones(4))
    lower = backend.multiply(x, x)
    assert lower.level == 2 and lower.scale != x.scale
    with pytest.raises(LevelViolation, match="operands"):
        backend.add(x, lower)
    with pytest.raises(LevelViolation, match="scales"):  # the modulus dropped, the scale not mended
        backend.add(Simulated(x.values, 2, x.scale), lower)
    assert backend.add(backend.lower(x, 2), lower).values[0] == 2
    with pytest.raises(LevelViolation, match="raised"):
        backend.lower(lower, 3)
    with pytest.raises(LevelViolation, match="below the 1"):
        backend.multiply_constant(backend.lower(x, 1), 2.0)
    with pytest.raises(RangeViolation):
        backend.bootstrap(backend.encrypt(np.full(4, 2 * backend.parameters.largest)))
    with pytest.raises(RangeViolation):
        backend.encrypt(np.full(4, np.nan))
    assert backend.bootstraps == 0
    assert backend.bootstrap(lower).level == 3 and backend.bootstraps == 1


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_exact_program_is_the_model(name):
    decoder = weights(SHAPES[name])
    tokens = texts(SHAPES[name])[0]
    program = build_program(decoder.config, Degrees(), Options(skip=False), 64)
    plain = np.asarray(PlainDecoder(decoder, 20).advance(tokens))
    np.testing.assert_allclose(exact_logits(decoder, program, tokens), plain - plain.mean(1, keepdims=True), atol=2e-4)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_simulated_logits_are_near_the_models(name):
    decoder, schedule, meaning = prepared(SHAPES[name], parameters=SMALL)
    tokens = texts(SHAPES[name])[0]
    backend = Simulator(SMALL)
    server = Server(meaning, schedule, backend)
    server.take(encrypted(backend, decoder.config, tokens), len(tokens))
    server.step()
    found = np.concatenate([backend.decrypt(x) for x in server.values["logits"]])[: decoder.config.vocabulary]
    plain = np.asarray(PlainDecoder(decoder, 20).advance(tokens)[-1])
    np.testing.assert_allclose(meaning.logits(found), plain - plain.mean(), atol=0.02)


@pytest.mark.parametrize(
    "chosen",
    [
        Options(),
        Options(argmax="tournament"),
        Options(cache=False),
        Options(skip=False),
        Options(pack=False),
        Options(False, False, False, "tournament"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_every_way_generates_the_models_tokens_with_the_predicted_bootstraps(name, chosen):
    decoder, schedule, meaning = prepared(SHAPES[name], chosen, SMALL)
    prompt = texts(SHAPES[name])[0][:5]
    found = decode(meaning, schedule, Simulator(SMALL), prompt, 3)
    assert found.performed == found.predicted
    full = build_program(decoder.config, Degrees(), Options(skip=False), 64)
    logits = exact_logits(decoder, full, [*prompt, *found.tokens[:-1]])[len(prompt) - 1 :]
    for row, token, total in zip(logits, found.tokens, found.sums, strict=True):
        second, best = np.sort(row)[-2:]
        if best - second < meaning.ranges.resolved:  # a near-tie: what follows is of a mixture of tokens
            break
        assert token == np.argmax(row) and abs(total - 1) < 0.05


class Unbounded(Simulator):
    """Without ranges: counts and levels do not depend on values, and those of random shapes wander."""

    def within(self, x, bound):
        pass


@settings(max_examples=8, deadline=None)
@given(decoders(largest=2), options, st.integers(6, 9), st.integers(8, 13), st.integers(0, 1), st.integers(1, 4))
def test_performed_is_predicted_for_any_shape(config, options, log_ring, levels, reserve, length):
    """Small rings: values of many ciphertexts."""
    parameters = CkksParameters(log_ring=log_ring, levels=levels, reserve=reserve)
    _, schedule, meaning = prepared(config, options, parameters, Degrees(5, 5, 1, 5, 5, 2, 1))
    backend = Unbounded(parameters)
    with np.errstate(all="ignore"):
        found = decode(meaning, schedule, backend, texts(config)[0][:length], 3)
    assert found.performed == found.predicted
    assert backend.lowest >= reserve


def test_a_missing_bootstrap_is_noticed():
    _, schedule, meaning = prepared(SHAPES["gpt2-tiny"])
    for left_out in schedule.refreshes[:4]:
        fewer = replace(schedule, refreshes=tuple(other for other in schedule.refreshes if other is not left_out))
        with pytest.raises(LevelViolation):
            decode(meaning, fewer, Simulator(PAPER), [1, 2, 3], 1)


def test_a_value_out_of_range_is_named():
    _, schedule, meaning = prepared(SHAPES["gpt2-tiny"])
    series = meaning.ranges.series["layer1.activation"]
    meaning.ranges.series["layer1.activation"] = replace(series, low=series.low / 8, high=series.high / 8)
    with pytest.raises(UserError, match=r"layer1\.activation: a value of .* calibrate"):
        decode(meaning, schedule, Simulator(PAPER), texts(SHAPES["gpt2-tiny"])[0], 1)


@pytest.mark.parametrize("prompt, tokens", [([], 1), ([97], 1), ([-1], 1), ([1] * 200, 58)])
def test_impossible_requests_are_refused(prompt, tokens):
    _, schedule, meaning = prepared(SHAPES["gpt2-tiny"])
    with pytest.raises(UserError, match=r"give tokens|ask for fewer"):
        decode(meaning, schedule, Simulator(PAPER), prompt, tokens)


def test_calibration_needs_attention():
    decoder = weights(SHAPES["gpt2-tiny"])
    with pytest.raises(UserError, match="passages"):
        calibrate(decoder, _program(3, 2), [[1]])


def cli(*arguments):
    return CliRunner().invoke(main, arguments)


def test_command_line_plans_and_simulates():
    plan = json.loads(cli("plan", "arhe", "--model", "gpt2-small", "--context", "33", "--bootstrap-seconds", "2", "--json").stdout)
    assert plan["seconds_step"] == 2 * plan["bootstraps_step"] and plan["bootstraps_step"] < 1072
    assert {"ladder", "bootstraps_prompt", "formula", "shortest_path", "step_by_part"} <= set(plan)
    run = cli(
        "arhe", "simulate", "--model", "llama-tiny", "--tokens", "3", "--log-ring", "9", "--margin", "1.5", "--quiet", "--json"
    )
    result = json.loads(run.stdout)
    assert len(result["predicted"]) == 3 and result["predicted"] == result["performed"]


@pytest.mark.parametrize(
    "arguments, names",
    [
        (("plan", "arhe", "--levels", "3"), "takes 5 levels"),
        (("plan", "arhe", "--context", "0"), "context 0"),
        (("plan", "arhe", "--model", "nothing"), "nothing"),
        (("arhe", "simulate", "--model", "gpt2-tiny", "--prompt", "x"), "--prompt"),
    ],
)
def test_command_line_errors_are_one_line(arguments, names):
    done = cli(*arguments)
    assert done.exit_code == 2 and names in done.stderr and done.stderr.count("\n") == 1
