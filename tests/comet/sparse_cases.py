"""Random predictors for tiny models, whose choices no rounding changes, and what a float64 model computes with them."""

from itertools import count

import numpy as np
from opt_reference import run

from spu_llm.comet.prepared import LayerSparsity, LowRank
from spu_llm.models.calibration import calibrate
from spu_llm.soal.maxima import by_reference, measure_maxima

GAP = 0.05  # of scores that differ by about 10; roundings move them by 0.01 at most


def calibrated(decoder, prefix, reference="learned"):
    random = np.random.default_rng(0)
    longest = decoder.config.positions - len(prefix)
    texts = [random.integers(0, decoder.config.vocabulary, length).tolist() for length in [longest] * 30 + [2] * 30]
    found = calibrate(decoder, texts, prefix)
    if reference == "learned":
        return found
    return by_reference(found, reference, getattr(measure_maxima(decoder, texts, prefix, found), reference))


def low_rank(random, width, outputs, rank):
    shapes = (width, rank), (rank,), (rank, outputs), (outputs,)
    return LowRank(*(random.standard_normal(shape).astype(np.float32) for shape in shapes))


def sparsity(config, seed, blocks, active, heads, rank=3):
    """Every layer computes `active` of its `blocks`, and `heads` heads but for the first one, which computes all."""
    random = np.random.default_rng(seed)
    return tuple(
        LayerSparsity(
            random.permutation(config.ffn).astype(np.int32),
            low_rank(random, config.width, blocks, rank),
            active,
            low_rank(random, config.width, config.heads, rank) if i else None,
            heads if i else config.heads,
            threshold=float(random.standard_normal()),
        )
        for i in range(config.layers)
    )


def separated(decoder, tokens, prefix, blocks, active, heads, rank=3):
    """The first such predictors that choose alike when all scores after the prefix are off by GAP / 2."""
    for seed in count():
        layers = sparsity(decoder.config, seed, blocks, active, heads, rank)
        records = run(decoder, tokens, chooser(layers, prefix))[1]
        gaps = [GAP]
        for layer, before, (y, *_) in zip(layers, [None, *records], records, strict=False):
            if layer.active_blocks < blocks:
                gaps.append(np.abs(layer.neurons.scores(y[prefix:]) - layer.threshold).min())
            if layer.heads is not None and layer.active_heads < decoder.config.heads:
                falling = -np.sort(-layer.heads.scores(before[0][prefix:]), axis=1)
                gaps.append((falling[:, heads - 1] - falling[:, heads]).min())
        if min(gaps) >= GAP:
            return layers
    raise AssertionError


def chooser(layers, prefix, together=()):
    """What `run` computes: no choice before `prefix`, and none of heads at the positions `together`."""

    def choose(i, y, before, hidden):
        layer = layers[i]
        heads = np.ones((len(y), layer.active_heads), bool)
        if layer.heads is not None:
            heads = best(layer.heads.scores(before), layer.active_heads)
        heads[[*range(prefix), *together]] = True
        blocks = above(layer.neurons.scores(y), layer.threshold, layer.active_blocks)
        blocks[:prefix] = True
        return blocks[:, layer.block_of], heads

    return choose


def best(scores, chosen):
    found = np.zeros(scores.shape, bool)
    np.put_along_axis(found, np.argsort(-scores, axis=1)[:, :chosen], True, 1)
    return found


def above(scores, threshold, chosen):
    """The first that score above the threshold, then the first of the others."""
    found = np.zeros(scores.shape, bool)
    for row, values in zip(found, scores, strict=True):
        order = [*np.flatnonzero(values > threshold), *np.flatnonzero(values <= threshold)]
        row[order[:chosen]] = True
    return found
