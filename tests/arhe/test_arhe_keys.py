"""Key files: what the public ones hold and do not hold, and what is said of those that are damaged or another client's."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("openfhe", reason="OpenFHE's wheel runs on Python 3.10 only")

import openfhe
from openfhe_keys import automorphism_keys, coefficients, evaluated, secret_polynomial, switching_key

from spu_llm.arhe import Degrees, Options
from spu_llm.arhe.keys import PUBLIC, SECRET, load_public, write_keys
from spu_llm.arhe.parameters import TOY
from spu_llm.arhe.shapes import SHAPES
from spu_llm.arhe.terms import Terms

RING = 2**6
TERMS = Terms("gpt2-tiny", SHAPES["gpt2-tiny"], replace(TOY, log_ring=6, slots=0), Degrees(), Options())


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    write_keys(folder, TERMS)
    return folder


@pytest.fixture(scope="module")
def secret(client):
    """The secret polynomial by prime."""
    key = openfhe.DeserializePrivateKeyString((client / SECRET).read_bytes(), openfhe.BINARY)
    return secret_polynomial(openfhe.Serialize(key, openfhe.JSON))


@pytest.fixture(scope="module")
def evaluation_keys(client):
    """Every key of the public folder, as it is after loading: {index: digits}; products' key at index 0."""
    keys = load_public(client / PUBLIC, evaluation=True)
    found = automorphism_keys(openfhe.SerializeEvalAutomorphismKeyString(openfhe.JSON, keys.tag))
    return found | {0: switching_key(json.loads(openfhe.SerializeEvalMultKeyString(openfhe.JSON, keys.tag)))}


def bytes_of(secret):
    """The secret as OpenFHE keeps it, and as coefficients, prime by prime."""
    for prime, evaluations in secret.items():
        yield evaluations.astype(np.uint64).tobytes()
        yield (coefficients(evaluations, prime) % prime).astype(np.uint64).tobytes()


def test_no_public_file_holds_the_secrets_bytes(client, secret):
    pieces = [piece[:64] for piece in bytes_of(secret)]
    assert any(piece in (client / SECRET).read_bytes() for piece in pieces)  # it would be found
    for path in (client / PUBLIC).iterdir():
        data = path.read_bytes()
        assert not any(piece in data for piece in pieces), path


def test_no_polynomial_of_a_public_key_is_a_multiple_of_something_small(evaluation_keys):
    """A ternary polynomial, as secrets are, times any constant has three values; errors have some twenty."""
    assert {0, 2 * RING - 4, 2 * RING - 2, 2 * RING - 1} <= set(evaluation_keys)  # products, sparse secret, conjugation
    for index, digits in evaluation_keys.items():
        for pair in digits:
            for polynomial in pair:
                prime = next(iter(polynomial))
                assert len(set(coefficients(polynomial[prime], prime))) == RING, index


def opened(digit, secret, prime):
    """a s + b, as coefficients."""
    a, b = digit
    return coefficients((b[prime] + a[prime] * secret) % prime, prime)


def ternary(message, factor, prime):
    """x in {-1, 0, 1} with message = factor x + error modulo the prime, and the errors; None where there is none."""
    signs = np.array([-1, 0, 1], object)[:, None]
    errors = (message - signs * factor + prime // 2) % prime - prime // 2
    best = np.abs(errors).argmin(0)
    error = errors[best, np.arange(len(message))]
    return None if np.abs(error).max() > 40 else (signs[best, 0], error)


def test_keys_of_the_sparse_secret_are_encryptions(evaluation_keys, secret):
    """Index 2N - 2 is the sparse secret under the dense one, 2N - 4 the dense one under the sparse one, both with errors."""
    first = next(iter(secret))
    up, down = evaluation_keys[2 * RING - 2], evaluation_keys[2 * RING - 4]
    factor = product(prime for prime in up[0][0] if prime not in secret)
    sparse, error = ternary(opened(up[0], secret[first], first), factor, first)
    assert np.abs(sparse).sum() == 32 and len(set(error)) > 3
    ((a, _),) = down
    factor = product(prime for prime in a if prime != first)
    assert ternary(opened(down[0], secret[first], first), factor, first) is None
    dense, error = ternary(opened(down[0], evaluated(sparse, first), first), factor, first)
    assert (dense == coefficients(secret[first], first)).all() and len(set(error)) > 3


def product(primes):
    found = 1
    for prime in primes:
        found *= prime
    return found


def test_errors_of_switching_keys(evaluation_keys, secret):
    """OpenFHE 1.6.1 draws them with a standard deviation of 1 where the parameters say 3.19: docs/leakage.md says so."""
    errors = []
    for digit in evaluation_keys[0]:
        for prime in secret:
            error = opened(digit, secret[prime], prime)
            if np.abs(error).max() < 40:  # a prime of another digit: nothing but the error
                errors.append(error.astype(float))
    assert len(errors) > len(secret)
    assert 0.9 < np.concatenate(errors).std() < 1.1
