"""OpenFHE's operations and bootstraps against float64, and an encrypted run against the simulator; a small ring, not secure."""

import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from arhe_cases import scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("openfhe", reason="OpenFHE's wheel runs on Python 3.10 only")

from spu_llm.arhe import Degrees, Meaning, Options, Simulator, calibrate, decode
from spu_llm.arhe.backend import LevelViolation, evaluate_series, repeated
from spu_llm.arhe.ckks import OpenFheBackend, make_context, make_keys
from spu_llm.arhe.parameters import TOY
from spu_llm.arhe.shapes import random_decoder
from spu_llm.arhe.slots import ABSENT, Places, SlotMap, rotation_steps
from spu_llm.errors import UserError
from spu_llm.models import DecoderConfig

SMALL = replace(TOY, log_ring=9, slots=0)
SLOTS = SMALL.slots
PRECISE = 1e-8  # of one operation on values of about 1
REFRESHED = 2e-5  # of a bootstrap
several = settings(max_examples=5, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@cache
def client(few_keys=False):
    """A backend with both keys: keys are made once."""
    parameters = replace(SMALL, few_keys=few_keys)
    context = make_context(parameters)
    pair = make_keys(context, rotation_steps(SLOTS, few_keys))
    return OpenFheBackend(parameters, context, pair.publicKey, pair.secretKey)


def drawn(seed, count=SLOTS):
    return np.random.default_rng(seed).uniform(-1, 1, count)


@several
@given(seeds, st.integers(1, SMALL.levels), st.integers(-SLOTS, SLOTS))
def test_slotwise_operations(seed, level, steps):
    backend, a, b = client(level % 2 == 0), drawn(seed), drawn(seed + 1, SLOTS // 3)
    x, y = (backend.lower(backend.encrypt(v), level) for v in (a, b))
    b = np.pad(b, (0, SLOTS - len(b)))
    for found, wanted, spent in (
        (backend.add(x, y), a + b, 0),
        (backend.subtract(x, y), a - b, 0),
        (backend.rotate(x, steps), np.roll(a, -steps), 0),
        (backend.add_constant(x, 0.7), a + 0.7, 0),
        (backend.multiply(x, y), a * b, 1),
        (backend.multiply(x, x), a * a, 1),
        (backend.multiply_constant(x, -2.5), -2.5 * a, 1),
    ):
        assert backend.level(found) == level - spent
        np.testing.assert_allclose(backend.decrypt(found), wanted, atol=PRECISE)


@several
@given(seeds, st.integers(1, 40), st.integers(1, 40), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_linear_maps_write_what_they_should_and_zeros(seed, taken, written, inputs, outputs, few_keys):
    """Random affine maps from random slots of one or two ciphertexts to random slots of others; the remaining input slots hold
    garbage that must not be read."""
    draw = np.random.default_rng(seed)
    matrix, offset = draw.uniform(-1, 1, (written, taken)), draw.uniform(-1, 1, written)
    source = Places(draw.choice(inputs * SLOTS, taken, replace=False), inputs)
    target = Places(draw.choice(outputs * SLOTS, written, replace=False), outputs)
    target.index[draw.random(written) < 0.2] = ABSENT
    slot_map = SlotMap(lambda x: matrix @ x + offset, source, target)
    flat = draw.uniform(-1, 1, inputs * SLOTS)
    backend = client(few_keys)
    found = backend.linear([backend.lower(backend.encrypt(part), 4) for part in flat.reshape(inputs, -1)], slot_map)
    assert [backend.level(x) for x in found] == [3] * outputs
    wanted = np.zeros(outputs * SLOTS)
    present = target.index != ABSENT
    wanted[target.index[present]] = (matrix @ flat[source.index] + offset)[present]
    np.testing.assert_allclose(np.concatenate([backend.decrypt(x) for x in found]), wanted, atol=PRECISE * taken)


@several
@given(seeds, st.integers(1, 24), st.integers(1, SLOTS // 24))
def test_folds_copy_and_add(seed, count, size):
    backend, values = client(), drawn(seed, size)
    x = backend.lower(backend.encrypt(values), 1)
    copied = repeated(backend, x, -size, count)
    np.testing.assert_allclose(backend.decrypt(copied)[: count * size], np.tile(values, count), atol=PRECISE)
    summed = repeated(backend, copied, size, count)
    np.testing.assert_allclose(backend.decrypt(summed)[:size], count * values, atol=PRECISE * count)
    assert backend.level(summed) == 1


@pytest.mark.parametrize("degree", [9, 27, 59])
def test_series_against_numpy(degree):
    coefficients, values = np.random.default_rng(degree).standard_normal(degree + 1) / degree, drawn(degree)
    backend = client()
    found = evaluate_series(backend, backend.encrypt(values), coefficients)
    assert SMALL.levels - backend.level(found) == degree.bit_length()
    np.testing.assert_allclose(backend.decrypt(found), chebyshev.chebval(values, coefficients), atol=1e-7)


def test_chain_of_bootstraps():
    """tanh of tanh of ..., five levels each, refreshed as the levels need it: counted, at full level, near float64."""
    backend, values = client(), 0.9 * drawn(3)
    coefficients = chebyshev.chebinterpolate(np.tanh, 27)
    x, before, wanted = backend.encrypt(values), backend.bootstraps, values
    for _ in range(4):
        if backend.level(x) - 5 < SMALL.reserve:
            x = backend.bootstrap(x)
            assert backend.level(x) == SMALL.levels
        x, wanted = evaluate_series(backend, x, coefficients), np.tanh(wanted)
    assert backend.bootstraps - before == 1
    largest = backend.bootstrap(backend.lower(backend.encrypt(SMALL.largest * drawn(4)), SMALL.reserve))
    np.testing.assert_allclose(backend.decrypt(largest), SMALL.largest * drawn(4), atol=REFRESHED * SMALL.largest)
    np.testing.assert_allclose(backend.decrypt(x), wanted, atol=REFRESHED)


def test_encrypted_passes_give_the_simulators_token_with_the_predicted_bootstraps():
    """A prompt's pass and a step with the cache, of a layer of random weights."""
    config = DecoderConfig("gpt2", 7, 8, 1, 2, 2, 12, 8, 1e-5, True)
    decoder, schedule = random_decoder(config), scheduled(config, SMALL, Degrees(27, 13, 1, 27, 13, 2, 1), Options())
    texts = np.random.default_rng(0).integers(0, 7, (6, 6)).tolist()
    meaning = Meaning(decoder, schedule.program, calibrate(decoder, schedule.program, texts, 2.0))
    backend = client()
    found = decode(meaning, schedule, backend, texts[0][:3], 2)
    simulated = decode(meaning, schedule, Simulator(SMALL), texts[0][:3], 2)
    assert found.performed == found.predicted == simulated.performed
    assert found.tokens == simulated.tokens
    np.testing.assert_allclose(found.sums, simulated.sums, atol=0.02)


def test_misuse_is_refused():
    backend = client()
    x = backend.encrypt(np.ones(3))
    with pytest.raises(LevelViolation, match="operands"):
        backend.add(x, backend.lower(x, 3))
    with pytest.raises(LevelViolation, match="raised"):
        backend.lower(backend.lower(x, 3), 4)
    with pytest.raises(LevelViolation, match="level 0"):
        backend.multiply_constant(backend.lower(x, 0), 2.0)
    with pytest.raises(LevelViolation, match="needs 1"):
        backend.bootstrap(backend.lower(x, 0))
    server = OpenFheBackend(SMALL, backend.context, backend.public_key)
    with pytest.raises(UserError, match="secret key"):
        server.decrypt(server.encrypt(np.ones(3)))


@pytest.mark.parametrize("wrong", [replace(SMALL, reserve=0), replace(SMALL, scale_bits=40)])
def test_parameters_without_bootstraps_are_refused(wrong):
    with pytest.raises(UserError, match="toy or secure"):
        make_context(wrong)


def test_a_small_ring_is_not_called_secure():
    with pytest.raises(UserError, match=r"ring 2\^9"):
        make_context(SMALL, secure=True)
