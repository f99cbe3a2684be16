"""The client's sampling against transformers' own logits processors."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import FlaxTemperatureLogitsWarper, FlaxTopKLogitsWarper, FlaxTopPLogitsWarper

from spu_llm.generation import Sampler, SamplingConfig, TextStream


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 2, 9, 40]),  # few shapes, for JAX compiles theirs for each
    temperature=st.floats(0.1, 3),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.floats(0.01, 0.99),
)
def test_distribution_matches_transformers(seed, size, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).standard_normal(size) * 3
    scores = FlaxTemperatureLogitsWarper(temperature)(None, jnp.asarray(logits)[None], 1)
    if top_k is not None:
        scores = FlaxTopKLogitsWarper(min(top_k, size))(None, scores, 1)
    scores = np.asarray(FlaxTopPLogitsWarper(top_p)(None, scores, 1)[0], np.float64)
    want = np.exp(scores - scores.max())
    want /= want.sum()
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    assert np.abs(Sampler(config).probabilities(logits) - want).max() < 1e-5


def test_greedy_and_seed():
    logits = np.array([0.0, 3.0, 2.9])
    assert Sampler(SamplingConfig())(logits) == 1
    config = SamplingConfig(temperature=1.0, seed=3)
    draws = [[Sampler(config)(logits), *(sampler(logits) for _ in range(30))] for sampler in (Sampler(config), Sampler(config))]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {0, 1, 2} or set(draws[0]) == {1, 2}


def test_draws_follow_the_distribution():
    sampler = Sampler(SamplingConfig(temperature=1.0))
    logits = np.log([0.1, 0.2, 0.7])
    counts = np.bincount([sampler(logits) for _ in range(20000)], minlength=3)
    assert counts / 20000 == pytest.approx([0.1, 0.2, 0.7], abs=0.02)


def test_stream_holds_back_half_a_character():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode(errors="replace")

    stream = TextStream(Bytes())
    assert [stream.push(byte) for byte in "a東b".encode()] == ["a", "", "", "東", "b"]
    assert stream.text == "a東b"
