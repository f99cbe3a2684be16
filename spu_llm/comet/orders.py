"""Secret orders between parties alone: the product of a random permutation of each, as shared one-hot matrices."""

from __future__ import annotations

from random import SystemRandom

import numpy as np

from ..models.config import Params
from ..runtime import Session

ORDERS = ("order.client", "order.owner")
_OPENED = ("query", "key_value", "out", "up", "down", "second", "order")
"""Parts that are static operands on SEMI2K."""


def share_orders(session: Session, size: int) -> None:
    """A random permutation of each party as a shared one-hot matrix."""
    for name, role in zip(ORDERS, ("client", "owner"), strict=True):
        session.share(name, np.eye(size, dtype=np.int64)[SystemRandom().sample(range(size), size)], role)


def keep_opened(session: Session, names: Params, slots: Params) -> None:
    """Open those of a layer's parts that are static operands."""
    for name in _OPENED:
        if name in names:
            session.keep_opened(names[name], slots[name])


def forget_opened(session: Session, names: Params, slots: Params) -> None:
    """Free what is kept of these on disk, before they are replaced."""
    for name in _OPENED:
        if name in names:
            session.forget_opened(names[name], slots[name])
