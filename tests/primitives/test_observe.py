"""How near values come to the bounds of their sites, bound by bound; what is seen counts, however the program is written."""

import jax
import numpy as np
import pytest
from harness import run_dealt
from scipy import special

from spu_llm.dealer.table import Table
from spu_llm.primitives import functions
from spu_llm.primitives.argmax import argmax
from spu_llm.primitives.compare import is_negative, relu
from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.observe import Site, observe, spare_bits
from spu_llm.primitives.scale import scale
from spu_llm.primitives.topk import top_k_mask
from spu_llm.primitives.truncate import truncate

SIGMOID = Table(special.expit, jax.nn.sigmoid, -8.0, 32, -1, 3)


def sites(function, *args):
    return observe(function, *args)[1]


def raw(*numbers, bits=20, modulus=64):
    return Fixed(np.array(numbers, np.int64), bits, modulus)


@pytest.mark.parametrize("modulus", [64, 40])
def test_truncation(modulus):
    most = 2 ** (modulus - 2)
    (found,) = sites(lambda x: truncate(x, 4), raw(most // 2, -most, 3, modulus=modulus))
    assert found == Site("truncate", 1.0, 0, 3)
    (found,) = sites(lambda x: truncate(x, 4), raw(most // 2, most // 2 * 3, 3, modulus=modulus))
    assert found == Site("truncate", 1.5, 1, 3)


def test_lookup():
    """Both ends count alike; of a table from 0 on only the upper one."""
    (found,) = sites(lambda x: lookup(x, SIGMOID), Fixed(encode([-8, 7.5, 0], 20), 20))
    assert found == Site("lookup", 1.0, 0, 3)
    (found,) = sites(lambda x: lookup(x, SIGMOID), Fixed(encode([-8.5, 3, 8, 100], 20), 20))
    assert (found.outside, found.used) == (3, pytest.approx((100 + 0.25) / 7.75))
    inverse = functions.reciprocal(0.5, 15.0, 16)
    (found,) = sites(lambda x: lookup(x, inverse), Fixed(encode([0, inverse.high / 2], 20), 20))
    assert found == Site("lookup", 0.5, 0, 2)
    (found,) = sites(lambda x: lookup(x, inverse), Fixed(encode([-0.001, 1], 20), 20))
    assert (found.used, found.outside) == (np.inf, 1)


def test_lookup_of_thirds():
    table = functions.silu()
    (found,) = sites(lambda x: lookup(x, table), Fixed(encode([table.low, 0, table.high - 1e-5], 24), 24))
    assert found.used == pytest.approx(1, abs=1e-5)
    assert found.outside == 0


@pytest.mark.parametrize(("modulus", "shift", "left"), [(64, 0, 64), (64, 14, 50), (40, 10, 30)])
def test_product(modulus, shift, left):
    """The sum, in what is left of the modulus; one that would wrap around in 64 bits is seen."""
    args = raw(2 ** (shift + left - 3), 0, modulus=modulus), raw(2, 1, bits=0)
    (found,) = sites(lambda x, y: contract("n,n->", x, y, 20 - shift), *args)
    assert found == Site("contract", 0.5, 0, 1)
    (found,) = sites(lambda x, y: contract("n,n->", x, y, 20 - shift), args[0], raw(6, 1, bits=0))
    assert found == Site("contract", 1.5, 1, 1)


def test_scale():
    x, y = raw(2**40, -(2**41)), raw(2**50, 2**49, modulus=53)
    found = sites(lambda x, y: scale(x, y, 20, 0), x, y)
    assert found == [
        Site("scale operand", 2.0**-21, 0, 2),
        Site("scale operand", 0.5, 0, 2),
        Site("scale", 2.0**7, 2, 2),
    ]


def test_comparisons():
    found = sites(lambda x: (is_negative(x, 10), relu(x, 11)), raw(1536, -3))
    assert found == [Site("comparison", 1.5, 1, 2), Site("comparison", 0.75, 0, 2)]
    rows = Fixed(np.array([[500, -500, 12], [1000, -1000, 0]]), 0)
    for function in (lambda x: argmax(x, bits=10), lambda x: top_k_mask(x, 2, 10)):
        (found,) = sites(function, rows)
        assert found == Site("order", 2000 / 1024, 1, 2)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(lambda r: jax.jit(f)(r))])
def test_calls_are_seen_through(wrap):
    inner = wrap(lambda r: truncate(Fixed(r, 20), 4).raw)

    def function(x):
        return truncate(x.with_raw(inner(x.raw) << 10), 14), contract("n,n->n", x, x, 4, 4)

    (first, second), found = observe(function, raw(2**40, 2**35))
    assert [site.kind for site in found] == ["truncate", "truncate", "contract"]
    assert found[0] == Site("truncate", 2.0**-22, 0, 2)
    assert (np.asarray(first.raw) == [2**28, 2**23]).all()
    assert (np.asarray(second.raw) == [2**48, 2**38]).all()


def test_results_and_order():
    """Results are plaintext's own; sites come in program order, one a use, the same whatever the values are."""

    def function(x):
        y = truncate(lookup(x, SIGMOID), 20)
        return y, scale(y, y, 10, 10)

    x = Fixed(encode(np.linspace(-4, 4, 5), 20), 20)
    (y, square), found = observe(function, x)
    assert np.abs(np.asarray(y.raw) / 2.0**20 - special.expit(x.raw / 2.0**20)).max() < 1e-4
    assert (np.asarray(square.raw) == (np.asarray(y.raw) >> 10) ** 2).all()
    kinds = ["lookup", "truncate", "scale operand", "scale operand", "scale"]
    assert [site.kind for site in found] == [site.kind for site in sites(function, Fixed(x.raw * 0, 20))] == kinds


def test_what_it_calls_outside_goes_wrong_and_what_inside_does_not():
    inside, outside = raw(*[2**61] * 500), raw(*[2**62 + 2**61] * 500)
    for x, wrong in ((inside, False), (outside, True)):
        (site,) = sites(lambda x: truncate(x, 4), x)
        off = np.abs(run_dealt(lambda x: truncate(x, 4), x)[0].raw - (x.raw >> 16)) > 1
        assert (site.outside > 0) == off.any() == wrong


def test_spare_bits():
    assert spare_bits(Site("truncate", 0.25, 0, 9)) == 2
    assert spare_bits(Site("truncate", 2.0, 1, 9)) == -1
    assert spare_bits(Site("truncate", 0.0, 0, 9)) == 64


def test_nothing():
    found = sites(lambda x: truncate(x, 4), Fixed(np.zeros((0,), np.int64), 20))
    assert found == [Site("truncate", 0.0, 0, 0)]
