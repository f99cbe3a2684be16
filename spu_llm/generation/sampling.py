"""How the client picks a token from logits."""

from __future__ import annotations

import secrets

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

_GREEDY = 1e-4  # below this temperature a draw is the best token, and logits / temperature would overflow


class SamplingConfig(BaseModel):
    """Greedy at temperature 0. Otherwise logits / temperature, cut to the top_k best, then to the least set of mass top_p."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: float = Field(default=0.0, ge=0, le=1e3)
    """By which logits are divided; 0 takes the best token."""

    top_k: int | None = Field(default=None, ge=1)
    """Draw from so many best tokens only; left out, from all."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the least set of tokens that has this probability."""

    seed: int | None = Field(default=None, ge=0)
    """Of the client's draws, to repeat them; left out, a secret one that is new in every run. Who knows it can replay the draws."""

    @property
    def drawn_seed(self) -> int:
        """The seed, or one that nobody else knows: others who know it can replay the client's draws."""
        return secrets.randbits(63) if self.seed is None else self.seed


class Sampler:
    """Draws tokens as `config` says; the same seed, if it gives one, gives the same tokens for the same logits."""

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._random = np.random.default_rng(config.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """A token id from logits [vocabulary]."""
        if self._config.temperature < _GREEDY:
            return int(logits.argmax())
        probabilities = self.probabilities(logits)
        return int(self._random.choice(len(probabilities), p=probabilities))

    def skip(self, tokens: int) -> None:
        """Leave out the draws of tokens that are known already: one number each, whatever the logits."""
        if self._config.temperature >= _GREEDY:
            self._random.random(tokens)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """The distribution [vocabulary] a token is drawn from: all on the best one where that is greedy."""
        c = self._config
        out = np.zeros(len(logits))
        if c.temperature < _GREEDY:
            out[logits.argmax()] = 1.0
            return out
        scaled = np.asarray(logits, np.float64) / c.temperature
        if c.top_k is None and c.top_p == 1:  # no order is needed, and finding it takes milliseconds
            p = np.exp(scaled - scaled.max())
            return p / p.sum()
        order = np.argsort(-scaled, kind="stable")[: c.top_k]
        p = np.exp(scaled[order] - scaled[order[0]])
        p /= p.sum()
        keep = np.cumsum(p) - p < c.top_p  # the token that crosses top_p is kept
        out[order[keep]] = p[keep] / p[keep].sum()
        return out
