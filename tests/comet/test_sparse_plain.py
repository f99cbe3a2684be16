"""Sparse runs in plaintext, against the dense model and against a float64 model that gathers what is chosen."""

from dataclasses import replace

import numpy as np
import pytest
from opt_reference import run, tiny

from spu_llm.comet.prepared import LayerSparsity, LowRank
from spu_llm.comet.sparse_plain import Setting, SparseReader, measure_quality
from spu_llm.models.losses import perplexity
from spu_llm.models.sequences import Reader, sequence_weights

RANDOM = np.random.default_rng(5)


def low_rank(width, outputs, rank=2):
    shapes = (width, rank), (rank,), (rank, outputs), (outputs,)
    return LowRank(*(RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes))


def sparsity(config, blocks, active_blocks, active_heads):
    return tuple(
        LayerSparsity(
            RANDOM.permutation(config.ffn).astype(np.int32),
            low_rank(config.width, blocks),
            active_blocks,
            low_rank(config.width, config.heads) if i else None,
            active_heads if i else config.heads,
            threshold=0.3,
        )
        for i in range(config.layers)
    )


def chooser(decoder, layers, how, skipped):
    """What the float64 model computes, by a loop over rows; layer 0 skips no head."""

    def choose(i, y, before, hidden):
        layer, config = layers[i], decoder.config
        heads = np.ones((len(y), config.heads), bool)
        if layer.heads is not None:
            heads = largest(layer.heads.scores(before), layer.active_heads)
        neurons = None
        if hidden is not None:
            size = config.ffn // layer.blocks
            rows = np.linalg.norm(decoder.params["layers"][i]["down"]["kernel"], axis=1)
            scores = layer.neurons.scores(y)
            if how == "oracle":
                masses = (hidden * rows)[:, layer.order]
                scores = np.stack([masses[:, b * size : (b + 1) * size].sum(1) for b in range(layer.blocks)], 1)
            chosen = scores > layer.threshold
            if how != "threshold":
                chosen = largest(chosen.astype(int) if how == "predicted" else scores, layer.active_blocks)
            neurons = np.zeros(hidden.shape, bool)
            for b in range(layer.blocks):
                neurons[:, layer.order[b * size : (b + 1) * size]] = chosen[:, b : b + 1]
            neurons[:skipped] = True
        heads[:skipped] = True
        return neurons, heads

    return choose


def largest(scores, count):
    chosen = np.zeros(scores.shape, bool)
    for row, values in enumerate(scores):
        chosen[row, sorted(range(len(values)), key=lambda i: -values[i])[:count]] = True
    return chosen


@pytest.mark.parametrize(
    ("shape", "blocks", "active", "heads", "n"),
    [({}, 6, 2, 2, 9), ({"heads": 1, "ffn": 7, "width": 5}, 7, 3, 1, 1), ({"layers": 3, "heads": 4, "ffn": 33}, 1, 1, 3, 5)],
)
@pytest.mark.parametrize("how", ["predicted", "best", "oracle", "threshold"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_what_is_chosen_is_computed_and_nothing_else(shape, blocks, active, heads, n, how, skipped):
    decoder = tiny(**shape)
    layers = sparsity(decoder.config, blocks, active, heads)
    tokens = RANDOM.integers(0, decoder.config.vocabulary, (2, n))
    read = SparseReader(decoder, layers, skipped)(tokens, Setting(how))
    want = np.stack([run(decoder, row, chooser(decoder, layers, how, skipped))[0] for row in tokens])
    np.testing.assert_allclose(read.logits, want, atol=2e-3)
    if how != "threshold" and n > skipped:
        np.testing.assert_allclose(read.blocks, active)
        np.testing.assert_allclose(read.heads[1:], heads)
        assert read.heads[0] == decoder.config.heads


@pytest.mark.parametrize("shape", [{}, {"heads": 1, "layers": 1}])
def test_everything_computed_is_the_dense_model(shape):
    decoder = tiny(**shape)
    layers = sparsity(decoder.config, 6, 6, decoder.config.heads)
    tokens = RANDOM.integers(0, 31, (3, 11))
    read = SparseReader(decoder, layers)(tokens)
    np.testing.assert_allclose(read.logits, np.asarray(Reader(decoder)(tokens)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(read.caught, 1.0, rtol=1e-6)


def test_all_that_fire_is_enough():
    """Blocks of one neuron: as many as fire at once catch everything, and one less does not."""
    decoder = tiny(ffn=8)
    layers = sparsity(decoder.config, 8, 8, 3)
    tokens = RANDOM.integers(0, 31, (2, 10))
    most = max(int((record[2] > 0).sum(1).max()) for row in tokens for record in run(decoder, row)[1])
    reader, dense = SparseReader(decoder, layers), np.asarray(Reader(decoder)(tokens))
    np.testing.assert_allclose(reader(tokens, Setting("oracle", blocks=most, skip_heads=False)).logits, dense, atol=1e-4)
    assert np.abs(reader(tokens, Setting("oracle", blocks=most - 1, skip_heads=False)).logits - dense).max() > 1e-3


def test_a_prefix_is_dense_and_settings_override():
    decoder = tiny()
    layers = sparsity(decoder.config, 6, 6, 3)
    tokens = RANDOM.integers(0, 31, (2, 8))
    dense = np.asarray(Reader(decoder)(tokens))
    read = SparseReader(decoder, layers, 3)(tokens, Setting(blocks=1, heads=1))
    np.testing.assert_allclose(read.logits[:, :3], dense[:, :3], atol=1e-4)
    assert np.abs(read.logits[:, 3:] - dense[:, 3:]).max() > 1e-2
    np.testing.assert_allclose(read.blocks, 1)
    np.testing.assert_allclose(read.heads, [3, 1])
    assert (SparseReader(decoder, layers, 3)(tokens, Setting(blocks=1, heads=1, skip_heads=False)).heads == 3).all()


def test_quality_is_what_others_count():
    decoder = tiny(layers=1)
    layers = tuple(replace(layer, active_blocks=2) for layer in sparsity(decoder.config, 6, 6, 3))
    sequences = RANDOM.integers(0, 31, (11, 7)).astype(np.int32)
    dense, all_of_it, some = measure_quality(decoder, layers, sequences, 2, [Setting(blocks=6), Setting()])
    weights = sequence_weights(7, (0, 0))
    assert dense.perplexity == pytest.approx(perplexity(decoder, sequences, weights), rel=1e-5)
    assert all_of_it.perplexity == pytest.approx(dense.perplexity, rel=1e-4)
    assert (all_of_it.agreement, all_of_it.active_share, all_of_it.caught) == pytest.approx((1, 1, 1))
    logits = np.stack([run(decoder, row, chooser(decoder, layers, "predicted", 2))[0] for row in sequences])
    whole = np.stack([run(decoder, row)[0] for row in sequences])
    picked, theirs, wanted = logits.argmax(-1)[:, 1:-1], whole.argmax(-1)[:, 1:-1], sequences[:, 2:]
    assert some.accuracy == pytest.approx((picked == wanted).mean())
    assert some.agreement == pytest.approx((picked == theirs).mean())
    likely = logits[:, 1:-1] - np.log(np.exp(logits[:, 1:-1]).sum(-1, keepdims=True))
    assert np.log(some.perplexity) == pytest.approx(-np.take_along_axis(likely, wanted[..., None], -1).mean(), rel=1e-4)
    assert some.active_share == pytest.approx(2 / 6) and some.head_share == 1
