"""When secret orders that serve several tokens are renewed: the same for the plugin and for stock SPU."""

from __future__ import annotations

from ..progress import Progress, silent

SHUFFLE = "shuffle"
"""The phase that renewing orders is booked to."""


class Renewing:
    """Goes before a decoder among the bases of a class: renews orders before a pass whose tokens would be more than they serve.

    A pass takes one order, however many tokens it has; they are counted before it begins. `renew_after`: tokens that an order
    serves; None: it is never renewed.
    """

    renew_after: int | None = None
    _since = 0

    def renew(self, progress: Progress = silent) -> None:
        """Put heads and blocks of every layer into new secret orders."""
        raise NotImplementedError

    def _count(self, tokens: int) -> None:
        if self.renew_after is not None and self._since and self._since + tokens > self.renew_after:
            self.renew()
        self._since += tokens


def active_heads(layer: int | None) -> str:
    """The public variable with the numbers of a layer's active heads; of all heads where none are predicted."""
    return "active.all" if layer is None else f"active.{layer}"
