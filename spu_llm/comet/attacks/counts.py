"""Which token it is, from how many blocks are computed in each layer."""

from __future__ import annotations

import numpy as np

from .classifiers import Classifier, constant, discriminant, neighbours
from .rate import Random, Rate
from .shuffle import Masks

_HELD_OUT = 4  # every fourth public text chooses between classifiers


def name_token(public: Masks, victims: Masks, random: Random) -> Rate:
    """How often a token is named from the counts of its active blocks, layer by layer; baseline: always the public text's most
    frequent token.

    A linear discriminant and a vote of neighbours learn from public text; the better one on a part of it that neither learned from
    is used, or the constant guess, if neither beats it there. What stands around a token is not used.
    """
    x, asked = _counts(public), _counts(victims)
    held = np.arange(len(public.tokens)) % _HELD_OUT == _HELD_OUT - 1

    def score(classifier: Classifier) -> float:
        found = classifier(_rows(x[~held]), public.tokens[~held].ravel(), _rows(x[held]))
        return float((found == public.tokens[held].ravel()).mean())

    best = max((constant, discriminant, neighbours), key=score)
    always, found = (each(_rows(x), public.tokens.ravel(), _rows(asked)) for each in (constant, best))
    shape = victims.tokens.shape
    right, usual = ((guess.reshape(shape) == victims.tokens).mean(1) for guess in (found, always))
    return Rate.of(right, usual, random)


def _counts(masks: Masks) -> np.ndarray:
    """Active blocks [texts, tokens, layers of all groups], float64."""
    return np.concatenate([group.sum(-1) for group in masks.groups], -1).astype(float)


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])
