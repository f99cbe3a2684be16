"""Which block it is, from how often it is computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

from .rate import Random, Rate
from .shuffle import Renewal, View, watch

_BALANCING = 5  # turns of rows and columns
_TINY = 1e-12  # of belief that is never lost


def identify(public: np.ndarray, victims: np.ndarray, renewal: Renewal, random: Random, samples: int = 8) -> Rate:
    """Share of a layer's blocks whose identity is found at the end of a period; baseline: a random matching's, 1 / blocks.

    public, victims: masks [texts, tokens, layers, blocks]. Blocks are taken as firing independently, as often as in public text;
    positions and blocks are matched by the largest likelihood. With partial renewal what was believed of a position is kept until
    it is renewed, and averaged among those it is permuted with. At most `samples` periods of a text are looked at.
    """
    often = (public.sum((0, 1)) + 0.5) / (public.shape[0] * public.shape[1] + 1)
    shares = [_identified(watch(masks, renewal, random), often, samples) for masks in victims]
    return Rate.of(np.array(shares), 1 / often.shape[-1], random)


def _identified(view: View, often: np.ndarray, samples: int) -> float:
    """Share of positions whose block is named, mean of layers and sampled periods."""
    chosen = set(np.linspace(0, len(view.spans) - 1, samples).round().astype(int))
    hits = [
        linear_sum_assignment(belief[layer], maximize=True)[1] == view.block_at[i, layer]
        for i, belief in _beliefs(view, often)
        if i in chosen
        for layer in range(len(often))
    ]
    return float(np.mean(hits))


def _beliefs(view: View, often: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """At the end of each period its number and the log of what is believed [layers, positions, blocks], up to a constant."""
    belief = np.zeros((*often.shape, often.shape[-1]))
    fires, rests = np.log(often)[:, None], np.log1p(-often)[:, None]
    for i, span in enumerate(view.spans):
        if i:
            belief = _mixed(belief, view.renewed[i])
        seen = view.seen[span]
        number = seen.sum(0)[..., None]
        belief = belief + number * fires + (len(seen) - number) * rests
        yield i, belief


def _mixed(belief: np.ndarray, renewed: np.ndarray) -> np.ndarray:
    """What is believed after the renewed positions [layers, positions] were permuted among themselves: the mean of theirs."""
    if renewed.all():
        return np.zeros_like(belief)
    share, new = np.exp(belief - belief.max(2, keepdims=True)) + _TINY, renewed[..., None]
    for axis in (1, 2) * _BALANCING:  # until each position and each block has about 1 in all (Sinkhorn)
        share /= share.sum(axis, keepdims=True)
    mean = (share * new).sum(1, keepdims=True) / np.maximum(new.sum(1, keepdims=True), 1)
    return np.log(np.where(new, mean, share))
