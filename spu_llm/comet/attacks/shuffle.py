"""What an observer sees: masks of blocks under a secret shuffle that is renewed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .rate import Random


@dataclass(frozen=True)
class Masks:
    """Texts of one length and what is computed of them.

    tokens: int [texts, tokens]. groups: bool [texts, tokens, layers, blocks] each, in the model's own order: neuron blocks, and
    heads where they are revealed too.
    """

    tokens: np.ndarray
    groups: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Renewal:
    """How the shuffle is renewed. period: tokens under one shuffle, or None for the whole request.

    partial: only the positions that were computed in the period, and as many others drawn at random, are permuted anew, among
    themselves; which they are is seen, for their weights are sent again.
    """

    period: int | None
    partial: bool = False

    def spans(self, tokens: int) -> list[slice]:
        """The tokens of each period of a text; the last may be shorter."""
        period = self.period or tokens
        return [slice(at, min(at + period, tokens)) for at in range(0, tokens, period)]


@dataclass(frozen=True)
class View:
    """A text as it is seen, and what is not seen of it.

    seen: bool [tokens, layers, blocks], by position. renewed: bool [periods, layers, blocks], which positions were permuted anew
    before each period. block_at: int [periods, layers, blocks], the block at each position, which nobody sees.
    """

    spans: list[slice]
    seen: np.ndarray
    renewed: np.ndarray
    block_at: np.ndarray


def watch(masks: np.ndarray, renewal: Renewal, random: Random) -> View:
    """Play the shuffle over one text's masks [tokens, layers, blocks]."""
    spans, shape = renewal.spans(len(masks)), masks.shape[1:]
    seen, renewed, block_at = np.empty_like(masks), [], []
    order = np.broadcast_to(np.arange(shape[1]), shape)
    for i, span in enumerate(spans):
        new = renewed_places(seen[spans[i - 1]], random) if i and renewal.partial else np.ones(shape, bool)
        order = _permuted(order, new, random)
        seen[span] = np.take_along_axis(masks[span], order[None], -1)
        renewed.append(new)
        block_at.append(order)
    return View(spans, seen, np.stack(renewed), np.stack(block_at))


def renewed_places(seen: np.ndarray, random: Random) -> np.ndarray:
    """Places [..., layers, blocks] that a partial renewal permutes after a period's masks [..., tokens, layers, blocks].

    Those that were active, and as many others, or all others if there are fewer.
    """
    touched = seen.any(-3)
    keys = np.where(touched, np.inf, random.random(touched.shape))
    rank = keys.argsort(-1).argsort(-1)
    return touched | (rank < touched.sum(-1, keepdims=True))


def _permuted(order: np.ndarray, new: np.ndarray, random: Random) -> np.ndarray:
    """What lies at each place [layers, blocks] after the places of `new` were permuted among themselves."""
    if new.all():
        return random.permuted(order, axis=-1)
    order = order.copy()
    for row, places in zip(order, new, strict=True):
        row[places] = random.permutation(row[places])
    return order


def renewed_share(groups: Sequence[np.ndarray], renewal: Renewal, random: Random) -> float:
    """Blocks that one renewal permutes, as a share of a layer's, mean over texts, layers and the renewals within a text (of the
    first group: neuron blocks, whose weights are what a renewal costs)."""
    if not renewal.partial:
        return 1.0
    spans = renewal.spans(groups[0].shape[1])[:-1]
    return float(np.mean([renewed_places(groups[0][:, span], random).mean() for span in spans]))
