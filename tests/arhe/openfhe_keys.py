"""What is inside OpenFHE's key files, read from its JSON with arithmetic of our own: polynomials by prime, in coefficient form."""

import json
from functools import cache

import numpy as np


def found(value, name):
    """Every object or list of that name, from the outside in."""
    if isinstance(value, dict):
        if isinstance(value.get(name), (dict, list)):
            yield value[name]
        for part in value.values():
            yield from found(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from found(part, name)


def secret_polynomial(text):
    """{prime: evaluations} of a secret key's JSON."""
    return towers(next(found(json.loads(text), "s")))


def automorphism_keys(text):
    """{index: [(a, b) for each digit]}, each {prime: evaluations}, of automorphism keys' JSON."""
    entries = json.loads(text)["value0"][0]["value"]["ptr_wrapper"]["data"]
    return {entry["key"]: switching_key(entry["value"]) for entry in entries}


def switching_key(value):
    a, b = next(found(value, "ak")), next(found(value, "bk"))
    return [(towers(x), towers(y)) for x, y in zip(a, b, strict=True)]


def towers(polynomial):
    parts = [part["v"]["ptr_wrapper"]["data"] for part in polynomial["v"]]
    return {part["m"]["v"]: np.array(part["v"], object) for part in parts}


def coefficients(evaluations, prime):
    """Between -prime/2 and prime/2, up to an automorphism: which root OpenFHE evaluates at first makes no difference to sizes."""
    values = _inverse(prime, len(evaluations)).dot(evaluations) % prime
    return np.where(values > prime // 2, values - prime, values)


def evaluated(polynomial, prime):
    """Coefficients -> evaluations, at the same root as `coefficients` takes."""
    ring = len(polynomial)
    powers = [[pow(_root(prime, ring), j * (2 * _reversed(i, ring) + 1), prime) for j in range(ring)] for i in range(ring)]
    return np.array(powers, object).dot(polynomial) % prime


@cache
def _root(prime, ring):
    order = 2 * ring
    roots = (pow(x, (prime - 1) // order, prime) for x in range(2, 1000))
    return next(root for root in roots if pow(root, ring, prime) == prime - 1)


@cache
def _inverse(prime, ring):
    back, part = pow(_root(prime, ring), -1, prime), pow(ring, -1, prime)
    rows = [[pow(back, j * (2 * _reversed(i, ring) + 1), prime) * part % prime for i in range(ring)] for j in range(ring)]
    return np.array(rows, object)


def _reversed(number, ring):
    """The bits of a number below the ring's degree, from the last to the first: OpenFHE's order of evaluations."""
    bits = ring.bit_length() - 1
    return int(format(number, f"0{bits}b")[::-1], 2)
