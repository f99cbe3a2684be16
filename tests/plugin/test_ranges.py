"""Ranges: measured, checked, and a table for them or a clear refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spu_llm
from spu_llm.errors import UserError
from spu_llm.plugin.tables import fit_table

X = np.linspace(0.5, 3, 24).reshape(2, 12).astype(np.float32)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


def test_calibrated_range_holds_the_samples():
    ranges = spu_llm.calibrate(norm, (X,), (2 * X,))
    (low, high) = ranges.spans["rsqrt[0]"]
    for sample in (X, 2 * X):
        squares = (sample**2).sum(-1)
        assert 0 < low < squares.min() and squares.max() < high
        assert np.abs(spu_llm.enable(norm, ranges=ranges)(sample) - norm(sample)).max() < 2e-3


def test_a_sample_outside_the_ranges_is_named():
    plugin = spu_llm.enable(norm, ranges=spu_llm.calibrate(norm, (X,)))
    assert spu_llm.calibrate(plugin, (X,)) is plugin.ranges
    with pytest.raises(UserError, match=r"rsqrt\[0\]: the sample reaches .* outside its range"):
        spu_llm.calibrate(plugin, (4 * X,))


def test_ranges_of_another_function():
    with pytest.raises(UserError, match=r"do not have tanh\[0\]"):
        spu_llm.enable(jnp.tanh, ranges=spu_llm.calibrate(norm, (X,)))(X)


def test_values_that_do_not_fit():
    with pytest.raises(UserError, match="does not fit 12 integer bits"):
        spu_llm.calibrate(norm, (1e3 * X,))
    precision = spu_llm.Precision(fraction_bits=10, integer_bits=28)
    spu_llm.calibrate(norm, (1e3 * X,), precision=precision)


def test_not_finite():
    with pytest.raises(UserError, match="not finite"):
        spu_llm.calibrate(lambda x: jnp.log(x - 10), (X,), (X * np.float32(np.inf),))


@pytest.mark.parametrize("span", [(-8.0, 8.0), (0.3, 0.31), (-3.0, 100.0), (5.0, 5.0)])
def test_table_is_right_on_all_of_its_range(span):
    table = fit_table(np.tanh, jnp.tanh, span, 3e-4, "here")
    x = np.linspace(*span, 1001)
    assert table.low <= span[0] and span[1] <= table.high
    assert np.abs(table.evaluate(x) - np.tanh(x)).max() < 4e-4


def test_no_table():
    with pytest.raises(UserError, match=r"here: no table .*calibrate"):
        fit_table(lambda x: 1 / x, lambda x: 1 / x, (1e-3, 1.0), 3e-4, "here")
