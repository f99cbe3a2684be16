"""How often an attack succeeds, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Random = np.random.Generator

_RESAMPLES = 2000  # of the bootstrap
_Z = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Rate:
    """How often an attack succeeds, and `baseline`, how often without looking at masks. low, high: 95% interval of rate - baseline.

    The interval is a bootstrap over texts, as tokens of a text are not independent; where an attack succeeds on all texts (or none)
    it is Wilson's with the number of texts.
    """

    rate: float
    baseline: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: np.ndarray, baseline: np.ndarray | float, random: Random) -> Rate:
        """Of shares of success, a text each [texts], and those without masks, of each text or one for all."""
        hits, count = np.asarray(hits, float), len(hits)
        gain = hits - baseline
        means = gain[random.integers(count, size=(_RESAMPLES, count))].mean(1)
        low, high = (float(end) for end in np.percentile(means, (2.5, 97.5)))
        if gain.any() and np.ptp(hits) == 0:
            low -= hits[0] * _Z**2 / (count + _Z**2)
            high += (1 - hits[0]) * _Z**2 / (count + _Z**2)
        return cls(float(hits.mean()), float(np.mean(baseline)), low, high)
