"""Masks: however they are added, hidden scores count for exactly nothing; what is not public is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spu_llm
from spu_llm.errors import UserError

RANDOM = np.random.default_rng(2)
SCORES = RANDOM.uniform(-3, 3, (2, 4, 6, 6)).astype(np.float32)
SHOWN = np.tril(np.ones((6, 6), bool)) & (np.arange(6) > 0)  # the first row hides everything
LEAST = np.finfo(np.float32).min
BIAS = RANDOM.standard_normal((1, 4, 6, 6)).astype(np.float32)

FORMS = {
    "where": lambda s: jnp.where(SHOWN, s, -1e9),
    "where, least": lambda s: jnp.where(SHOWN, s, LEAST),
    "where, infinite": lambda s: jnp.where(SHOWN[1:], s[:, :, 1:], -jnp.inf),
    "add": lambda s: s[..., 1:, :] / 2 + jnp.where(SHOWN[1:], 0.0, -1e4),
    "subtract": lambda s: s - 1e9 * (1 - SHOWN.astype(np.float32)),
    "multiply and subtract": lambda s: s * SHOWN - 1e10 * (1 - SHOWN.astype(np.float32)),
    "two masks": lambda s: s[..., 1:, :] + jnp.where(SHOWN[1:], 0.0, LEAST) + jnp.where(jnp.arange(6) < 4, 0.0, LEAST),
    "mask and bias": lambda s: s + (BIAS + jnp.where(SHOWN, 0.0, LEAST)),
    "then scaled and reshaped": lambda s: (jnp.where(SHOWN, s, -1e9) * 0.25).reshape(8, 6, 6),
    "then transposed": lambda s: jnp.swapaxes(jnp.where(SHOWN, s, -1e9), 0, 1)[:2],
    "then joined": lambda s: jnp.concatenate([jnp.where(SHOWN, s, -1e9), jnp.where(SHOWN.T, s, -1e9)], 1),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("reference", ["max", "first"])
def test_recognised(name, reference):
    def attention(s):
        return jax.nn.softmax(FORMS[name](s))

    scores = SCORES / (1 if reference == "max" else 4)  # the first score of a row must not be far below its largest
    want = attention(scores)
    ranges = spu_llm.calibrate(attention, (scores,), softmax_reference=reference)
    got = spu_llm.enable(attention, softmax_reference=reference, ranges=ranges)(scores)
    assert np.abs(got - want).max() < 2e-3
    assert not np.any(got[want == 0])


def test_mask_with_a_secret_bias():
    """T5 adds its mask to its relative position bias, which is a weight."""

    def attention(s, bias):
        return jax.nn.softmax(s + (bias + jnp.where(SHOWN, 0.0, LEAST)))

    assert np.abs(spu_llm.enable(attention)(SCORES, BIAS) - attention(SCORES, BIAS)).max() < 1e-3


def test_public_value_of_an_argument():
    def attention(s, mask):
        return jax.nn.softmax(jax.lax.select(mask > 0, s, jnp.full(s.shape, LEAST)))

    mask = np.broadcast_to(SHOWN, SCORES.shape).astype(np.int32)
    want = attention(SCORES, mask)
    plugin = spu_llm.enable(attention, public={"mask": mask})
    assert np.abs(plugin(SCORES) - want).max() < 1e-3
    assert np.abs(plugin(SCORES, mask) - want).max() < 1e-3


SECRET = {
    "select": lambda s, m: jax.nn.softmax(jnp.where(m > 0, s, LEAST)),
    "bias by select": lambda s, m: jax.nn.softmax(s + jnp.where(m > 0, 0.0, LEAST)),
    "with a public one": lambda s, m: jax.nn.softmax(s + jnp.where((m > 0) & SHOWN, 0.0, LEAST)),
    "product": lambda s, m: jax.nn.softmax(s - 1e9 * (1 - m)),
}


@pytest.mark.parametrize("name", SECRET)
def test_secret_masks_are_refused(name):
    mask = np.broadcast_to(SHOWN, SCORES.shape).astype(np.int32)
    with pytest.raises(UserError, match=r"test_masks.py.*enable\(public=") as caught:
        spu_llm.enable(SECRET[name])(SCORES, mask)
    assert "\n" not in str(caught.value)


MISUSED = {
    "sum": lambda s: jnp.where(SHOWN, s, -1e9).sum(),
    "square": lambda s: jnp.where(SHOWN, s, -1e9) ** 2,
    "returned": lambda s: jnp.where(SHOWN, s, -1e9),
    "negative factor": lambda s: jax.nn.softmax(-2 * jnp.where(SHOWN, s, -1e9)),
}


@pytest.mark.parametrize("name", MISUSED)
def test_masked_scores_elsewhere_are_refused(name):
    with pytest.raises(UserError, match="masked"):
        spu_llm.enable(MISUSED[name])(SCORES)
