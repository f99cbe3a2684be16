"""Training: forward pass and losses against others' code, and runs that are broken off."""

import jax
import numpy as np
import optax
import pytest
from conftest import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from spu_llm.errors import UserError
from spu_llm.models import Decoder, PlainDecoder, load_checkpoint
from spu_llm.models.losses import Batch, Teacher, distillation_loss, next_token_loss, perplexity
from spu_llm.models.sequences import Reader, cut_sequences, hidden_block, sequence_pass, sequence_weights, stacked
from spu_llm.models.taught_sparsity import Sparsity, sparsity_penalty
from spu_llm.models.training import Kept, TrainingConfig, fresh, rows_of, train

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 97, (6, 12)).astype(np.int32)
WEIGHTS = sequence_weights(12)


@pytest.fixture(scope="module")
def decoder(checkpoints):
    return load_checkpoint(checkpoints["gpt2"]).decoder


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7)])
def test_sequences_give_what_decoding_gives(family, shape, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    tokens = RANDOM.integers(0, 97, shape)
    found = np.asarray(Reader(decoder)(tokens))
    for row, logits in zip(tokens, found, strict=True):
        assert np.abs(PlainDecoder(decoder, len(row)).advance(row) - logits).max() < 1e-4


def test_next_token_loss_is_cross_entropy():
    logits = RANDOM.normal(0, 5, (6, 12, 97)).astype(np.float32)
    weights = sequence_weights(12, (5, 6, 7))
    want = optax.softmax_cross_entropy_with_integer_labels(logits[:, 2:-1], TOKENS[:, 3:]).mean()
    assert np.isclose(next_token_loss(logits, Batch(TOKENS, weights)), want, rtol=1e-5)


def teacher_and_logits(k):
    logits, theirs = (RANDOM.normal(0, 4, (2, 12, 97)).astype(np.float32) for _ in range(2))
    p = np.exp(log_softmax(theirs.astype(np.float64), -1))
    ids = np.argsort(-p, -1)[..., :k]
    return logits, p, ids


def test_distillation_from_all_probabilities():
    logits, p, _ = teacher_and_logits(97)
    want = -(p * log_softmax(logits.astype(np.float64), -1)).sum(-1).mean()
    batch = Batch(TOKENS[:2], WEIGHTS, Teacher(None, p.astype(np.float32)))
    assert np.isclose(distillation_loss(logits, batch), want, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 97])
def test_distillation_from_the_best_probabilities(k):
    logits, p, ids = teacher_and_logits(k)
    logs, best = log_softmax(logits.astype(np.float64), -1), np.take_along_axis(p, ids, -1)
    chosen = np.take_along_axis(logs, ids, -1)
    want = -(best * chosen).sum(-1)
    if k < 97:
        want -= (1 - best.sum(-1)) * np.log1p(-np.exp(chosen).sum(-1))
    batch = Batch(TOKENS[:2], WEIGHTS, Teacher(ids, best.astype(np.float32)))
    assert np.isclose(distillation_loss(logits, batch), want.mean(), rtol=1e-4)


def batch_of(step):
    return Batch(TOKENS[rows_of(step, 2, len(TOKENS), 3)], WEIGHTS)


CONFIG = TrainingConfig(steps=12, rate=3e-3, warmup=2, save_seconds=0.0)


def leaves(trained):
    return jax.tree_util.tree_leaves(trained.decoder.params)


def test_a_text_is_learned_and_the_seed_decides(decoder):
    config = TrainingConfig(steps=40, rate=1e-2, warmup=5)
    begun = fresh(decoder.config, 1)
    before = perplexity(begun, TOKENS, WEIGHTS)
    first, second = (train(begun, batch_of, next_token_loss, config) for _ in range(2))
    assert before > 80 and perplexity(first.decoder, TOKENS, WEIGHTS) < 5
    assert first.losses == second.losses
    assert all(np.array_equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))
    other = train(fresh(decoder.config, 2), batch_of, next_token_loss, config)
    assert other.losses[0] != first.losses[0]


def test_perplexity_is_that_of_decoding(decoder):
    rows = [log_softmax(PlainDecoder(decoder, 12).advance(row).astype(np.float64), -1) for row in TOKENS]
    want = np.exp(-np.mean([np.take_along_axis(p[:-1], row[1:, None], -1) for p, row in zip(rows, TOKENS, strict=True)]))
    assert np.isclose(perplexity(decoder, TOKENS, WEIGHTS, batch=4), want, rtol=1e-4)


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def whole(decoder):
    return train(decoder, batch_of, next_token_loss, CONFIG)


@pytest.mark.parametrize("at", [0, 7, 11])
def test_a_broken_run_goes_on_where_it_was(at, decoder, whole, tmp_path):
    asked = []

    def breaking(step):
        asked.append(step)
        if step == at and len(asked) == at + 1:
            raise Broken
        return batch_of(step)

    kept = tmp_path / "training.safetensors"
    with pytest.raises(Broken):
        train(decoder, breaking, next_token_loss, CONFIG, Kept(kept, ""))
    resumed = train(decoder, breaking, next_token_loss, CONFIG, Kept(kept, ""))
    assert asked == [*range(at + 1), *range(at, CONFIG.steps)]
    assert resumed.losses == whole.losses
    assert all(np.array_equal(a, b) for a, b in zip(leaves(resumed), leaves(whole), strict=True))
    assert not list(tmp_path.glob("*.part"))


def test_another_run_s_state_is_not_used(decoder, tmp_path):
    kept = tmp_path / "training.safetensors"
    asked = []

    def noting(step):
        asked.append(step)
        return batch_of(step)

    train(decoder, noting, next_token_loss, CONFIG, Kept(kept, "a"))
    train(decoder, noting, next_token_loss, CONFIG, Kept(kept, "a"))
    assert len(asked) == CONFIG.steps
    train(decoder, noting, next_token_loss, CONFIG, Kept(kept, "b"))
    train(fresh(decoder.config, 5), noting, next_token_loss, CONFIG, Kept(kept, "b"))
    assert len(asked) == 3 * CONFIG.steps
    kept.write_bytes(kept.read_bytes()[:1000])
    train(decoder, noting, next_token_loss, CONFIG, Kept(kept, "a"))
    assert len(asked) == 4 * CONFIG.steps


def test_a_rate_that_destroys_the_model(decoder):
    with pytest.raises(UserError, match="train with a rate below"):
        train(decoder, batch_of, next_token_loss, TrainingConfig(steps=20, rate=1e30))


@given(batch=st.integers(1, 9), count=st.integers(1, 13), seed=st.integers(0, 2**32))
def test_every_sequence_once_an_epoch(batch, count, seed):
    rows = np.concatenate([rows_of(step, batch, count, seed) for step in range(2 * count)])
    for epoch in range(len(rows) // count):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(length=st.integers(2, 9), prefix=st.integers(0, 8), tokens=st.integers(0, 40))
def test_sequences_hold_the_text(length, prefix, tokens):
    ids, first = np.arange(100, 100 + tokens), tuple(range(prefix))
    if length <= prefix or tokens < length - prefix:
        with pytest.raises(UserError, match="give a longer one"):
            cut_sequences(ids, length, first)
        return
    found = cut_sequences(ids, length, first)
    assert (found[:, :prefix] == first).all()
    own = found[:, prefix:].ravel()
    assert np.array_equal(own, ids[: len(own)]) and tokens - len(own) < length - prefix
    assert sequence_weights(length, first).sum() == length - max(prefix - 1, 0)


# Sparsity


def paid(inputs, sparsity, asked):
    """The penalty as `Sparsity` describes it, position by position in float64."""
    layers, batch, n, _ = inputs.shape
    inputs = inputs.astype(np.float64).reshape(layers, batch * n, -1, sparsity.group)
    norms = np.linalg.norm(np.maximum(inputs, 0), axis=-1)
    total = 0.0
    for layer, seen in zip(norms, inputs, strict=True):
        often = (layer > 0).mean(0)
        usual = layer[layer > 0].mean() if layer.any() else 1.0
        least = np.sort(layer, 1)[:, ::-1][:, np.ceil(asked * layer.shape[1]).astype(int) - 1]
        free = (layer >= least[:, None]) & (layer > 0)
        for row, own in zip(layer, free, strict=True):
            due = ~own if sparsity.tail else max((row > 0).mean() / asked - 1, 0)
            prices = often / often.mean() if often.any() else often
            total += (due * prices * row / usual).mean() / asked
        for unit in np.ndindex(seen.shape[1:]):
            at = seen[free[:, unit[0]]][(slice(None), *unit)]
            if len(at) and (at > 0).mean() < sparsity.rare:
                total += np.maximum(-at, 0).sum() / usual / (seen[0].size * asked)
    return sparsity.strength * total / (layers * batch * n)


@pytest.mark.parametrize(("group", "tail", "rare"), [(1, False, 0), (4, False, 0), (1, True, 0.6), (4, True, 0), (4, True, 0.4)])
@given(seed=st.integers(0, 2**32), active=st.floats(0.05, 1), positive=st.floats(0, 1))
@settings(max_examples=6, deadline=None)
def test_the_penalty_is_what_it_says(group, tail, rare, seed, active, positive):
    random = np.random.default_rng(seed)
    inputs = random.exponential(2, (3, 2, 5, 12)) * np.where(random.random((3, 2, 5, 12)) < positive, 1, -1)
    sparsity = Sparsity(active, 2.5, group, tail=tail, rare=rare)
    found = sparsity_penalty(np.float32(inputs), sparsity, active)
    assert np.isclose(found, paid(inputs, sparsity, active), rtol=1e-3, atol=1e-4)


def test_a_token_that_uses_few_units_pays_nothing():
    units = np.zeros((1, 1, 2, 8), np.float32)
    units[0, 0, 0, :2], units[0, 0, 1, :] = 3.0, 1.0
    slope = jax.grad(lambda units: sparsity_penalty(units, Sparsity(0.25, 1.0), 0.25))(units)
    assert np.isfinite(slope).all() and not slope[0, 0, 0].any() and (slope[0, 0, 1] > 0).all()


def test_a_tail_leaves_the_largest_groups_alone():
    """Three groups may be used: the two smallest of five are pressed down, in proportion to their norms' slope."""
    units = np.repeat(np.float32([5, 1, 4, 2, 3]), 2).reshape(1, 1, 1, 10)
    slope = jax.grad(lambda units: sparsity_penalty(units, Sparsity(0.6, 1.0, 2, tail=True), 0.6))(units)
    assert np.array_equal(slope[0, 0, 0] > 0, np.repeat([False, True, False, True, False], 2))


def test_a_unit_that_is_silent_where_its_group_is_used_is_drawn_up():
    """The first of two groups is used by both tokens; of its units the second never fires. The other group's are left alone."""
    inputs = np.float32([[2, -1, -1, -1], [3, -2, -1, -1]]).reshape(1, 1, 2, 4)
    sparsity = Sparsity(0.5, 1.0, 2, tail=True, rare=0.1)
    slope = jax.grad(lambda inputs: sparsity_penalty(inputs, sparsity, 0.5))(inputs)[0, 0]
    assert (slope[:, 1] < 0).all() and not slope[:, [0, 2, 3]].any()


def test_sparsity_is_for_relu(checkpoints):
    decoder = load_checkpoint(checkpoints["gpt2"]).decoder
    with pytest.raises(UserError, match="family gpt2 has no ReLU"):
        train(decoder, batch_of, next_token_loss, TrainingConfig(steps=1, rate=1e-3, sparsity=Sparsity(0.5, 1.0)))


@pytest.mark.parametrize("family", CONFIGS)
def test_hidden_units_are_those_of_the_layer(family, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    params = stacked(decoder.params)
    logits, units = sequence_pass(decoder.config, params, TOKENS, hidden_block(decoder.config))
    assert np.abs(logits - Reader(decoder)(TOKENS)).max() < 1e-5
    assert units.shape == (2, 6, 12, decoder.config.ffn)
    without, _ = sequence_pass(decoder.config, params, TOKENS, hidden_block(decoder.config, lambda units, inputs: 0 * units))
    layers = [layer | {"down": layer["down"] | {"kernel": 0 * layer["down"]["kernel"]}} for layer in decoder.params["layers"]]
    silent = Decoder(decoder.config, decoder.params | {"layers": layers})
    assert np.abs(without - Reader(silent)(TOKENS)).max() < 1e-5
    assert np.abs(without - logits).max() > 0.1


@pytest.mark.parametrize("group", [1, 5])
def test_units_in_use_become_few(group, checkpoints):
    """A model with the penalty learns its text too, with about as few units as asked, and a broken run goes on."""
    config = load_checkpoint(checkpoints["opt"]).decoder.config
    plan = TrainingConfig(steps=150, rate=1e-2, warmup=5, sparsity=Sparsity(0.25, 4.0, group))
    trained = train(fresh(config, 1), batch_of, next_token_loss, plan)
    _, units = sequence_pass(config, stacked(trained.decoder.params), TOKENS, hidden_block(config))
    used = np.asarray(units).reshape(2, 6, 12, -1, group).any(-1).mean()
    assert 0.05 < used < 0.35
    assert perplexity(trained.decoder, TOKENS, WEIGHTS) < 5 and trained.losses[-1] < 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1.0), "active 0"),
        ((0.5, -1.0), "strength -1.0"),
        ((0.5, 1.0, 0), "group 0"),
        ((0.5, 1.0, 1, 0.7, 0.7), "begin 0.7"),
        ((0.5, 1.0, 1, 0, 1, False, 0.1), "rare 0.1"),
    ],
)
def test_a_sparsity_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        Sparsity(*values)


def test_what_is_asked_falls_by_equal_factors():
    sparsity = Sparsity(0.0625, 1.0, begin=0.2, end=0.6)
    assert np.allclose([sparsity.asked(done) for done in (0, 0.2, 0.3, 0.4, 0.6, 1)], [1, 1, 0.5, 0.25, 0.0625, 0.0625])
