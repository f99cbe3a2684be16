"""A draft without a model: what followed the last time that the sequence ended as it does now (prompt lookup).

Costs microseconds; good where a text repeats itself or its prompt. Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft import Draft


class LookupDraft:
    """Continues the longest suffix of at most `longest` tokens that occurred before, by what came after its last occurrence.

    Where that ends with the sequence it begins anew: a text that goes round goes on doing so.
    Suffixes shorter than `shortest` are not looked for: what follows a single common token says little.
    """

    def __init__(self, vocabulary: int, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"suffixes of {shortest} to {longest} tokens: there are none")
        self.vocabulary = vocabulary
        self._longest, self._shortest = longest, shortest

    def propose(self, tokens: Sequence[int], length: int) -> Draft:
        """`length` tokens, one-hot rows; none where no suffix occurred before."""
        found = self._continuation(np.asarray(tokens, np.int64))
        found = np.resize(found, length if len(found) else 0)
        rows = np.zeros((len(found), self.vocabulary))
        rows[np.arange(len(found)), found] = 1.0
        return Draft([int(token) for token in found], rows)

    def _continuation(self, tokens: np.ndarray) -> np.ndarray:
        for size in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)  # the suffix itself is no occurrence
            places = np.flatnonzero((windows == tokens[-size:]).all(-1))
            if len(places):
                return tokens[places[-1] + size :]
        return tokens[:0]
