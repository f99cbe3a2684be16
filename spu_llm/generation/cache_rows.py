"""Which row of the cache holds which position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_DEAD = -1


class CacheRows:
    """Rows in the order in which they were written, the first `prefix` of them ahead of time.

    Positions that are taken back free their rows. With `appends` they do not: the rows stay, seen by nobody, and the next tokens
    take new ones. So where a pass writes does not depend on what was taken back, and a dealer can deal for it before that is known.
    """

    def __init__(self, prefix: int, appends: bool = False):
        self._positions = list(range(prefix))  # of each row, _DEAD where it was taken back
        self._appends = appends

    @property
    def written(self) -> int:
        """The row that the next token takes."""
        return len(self._positions)

    @property
    def length(self) -> int:
        """Positions held."""
        return 1 + max(self._positions, default=_DEAD)

    def append(self, count: int) -> None:
        """The next `count` positions have been written."""
        self._positions += range(self.length, self.length + count)

    def take_back(self, length: int) -> None:
        """Hold the first `length` positions only."""
        if self._appends:
            self._positions = [position if position < length else _DEAD for position in self._positions]
        else:
            del self._positions[length:]

    def seen(self, count: int, width: int) -> np.ndarray:
        """[count, width] bool: which of the first `width` rows each of the next tokens may attend to."""
        rows = np.arange(width)
        alive = np.append(np.array(self._positions) != _DEAD, np.ones(max(0, width - self.written), bool))[:width]
        return alive & (rows <= self.written + np.arange(count)[:, None])

    def rows_of(self, positions: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        """The rows of positions, among those held and those of the next `count` tokens."""
        row_of = {position: row for row, position in enumerate(self._positions)}
        row_of |= {self.length + i: self.written + i for i in range(count)}
        found = [row_of[position] for position in np.ravel(positions).tolist()]
        return np.array(found, np.int64).reshape(np.shape(positions))
