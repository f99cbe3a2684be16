"""One number of each row at a secret place, against numpy; what it costs."""

import jax
import numpy as np
import pytest
from harness import run_dealt
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.dealer import dpf
from spu_llm.primitives.entry import entry
from spu_llm.primitives.fixed import Fixed


@settings(deadline=None, max_examples=12)
@given(
    size=st.sampled_from([1, 2, 3, 8, 33, 64, 100]), shape=st.sampled_from([(), (1,), (5,), (2, 3)]), seed=st.integers(0, 99)
)  # fmt: skip
def test_any_row_and_place(size, shape, seed):
    random = np.random.default_rng(seed)
    x, place = random.integers(-(2**63), 2**63, (*shape, size)), random.integers(0, size, shape)
    found, cost = run_dealt(entry, Fixed(x, 5), Fixed(place, 0))
    np.testing.assert_array_equal(found.raw, np.take_along_axis(x, place[..., None], -1)[..., 0])
    assert found.bits == 5
    period = 1 << (size - 1).bit_length()
    assert (cost.messages, cost.bytes) == (1, 8 * (x.size + place.size))
    key = dpf.Correction.size(place.size, period.bit_length() - 1, 1)
    assert sum(cost.dealer_bytes) == 2 * key + 8 * period * place.size


def test_every_meaning():
    random = np.random.default_rng(0)
    x, place = random.integers(-(2**40), 2**40, (4, 3, 6)), random.integers(0, 6, (4, 3))

    def function(rows, at):
        return entry(rows, at), jax.vmap(entry)(rows, at), jax.vmap(entry, (None, 0))(rows[0], at[:, :3])

    for name, (direct, mapped, shared) in meanings(function, Fixed(x, 3), Fixed(place, 0)).items():
        want = np.take_along_axis(x, place[..., None], -1)[..., 0]
        np.testing.assert_array_equal(direct.raw, want, name)
        np.testing.assert_array_equal(mapped.raw, want, name)
        np.testing.assert_array_equal(shared.raw, [[x[0, j, at[j]] for j in range(3)] for at in place], name)


def test_refuses_what_is_no_place():
    rows = Fixed(np.zeros((2, 9), np.int64), 0)
    for place in (Fixed(np.zeros(2, np.int64), 1), Fixed(np.zeros(2, np.int64), 0, 3), Fixed(np.zeros(3, np.int64), 0)):
        with pytest.raises(ValueError, match="one whole number a row"):
            entry(rows, place)
