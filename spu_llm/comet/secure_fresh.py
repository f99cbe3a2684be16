"""Sparse decoding between the parties alone, with a fresh secret order of neurons for every token, by which nothing is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..generation.secure import SecureDecoder
from ..models.cache import LayerCache, Window, cache_shape
from ..progress import Progress
from ..runtime import Program, Session, Slot
from .network import SparseNetwork
from .orders import ORDERS, keep_opened, share_orders
from .stock_sparse import dense_layer, fresh_layer


class FreshSecureDecoder(SecureDecoder):
    """An OPT decoder that computes predicted blocks of neurons, in a fresh secret order for every token made one by one.

    Passes of several tokens are dense. What each party learns beyond `SecureDecoder`'s: nothing. The places of active blocks, which
    all see, are a uniform choice of a constant number (docs/leakage.md).
    """

    def __init__(self, session: Session, network: SparseNetwork, capacity: int, prefix: Sequence[int] = ()):
        super().__init__(session, network.decoder, capacity, prefix, network)  # type: ignore[arg-type]
        self._plans = network.plans

    def _share_cache(self, progress: Progress) -> None:
        super()._share_cache(progress)
        for names, slots in zip(self._params["layers"], self._slots["layers"], strict=True):
            for kind in ("heads", "neurons"):
                keep_opened(self.session, names[kind], slots[kind])

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        place = self._window(n)
        names = self._publish_window(place)
        for i in order(range(len(self._cache))):
            share_orders(self.session, self._blocks(i))
            kept = self._cache[i]
            arguments = (self._params["layers"][i], *ORDERS, "x", kept, names)
            self.session.run(self._layer_program(n, place, i), arguments, ("x", kept))

    def _blocks(self, i: int) -> int:
        return self._slots["layers"][i]["neurons"]["up_bias"].shape[0]

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        config, plan = self.decoder.config, self._plans[i]
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        matrix = Slot((self._blocks(i), self._blocks(i)), np.int64)
        slots = self._slots["layers"][i], matrix, matrix, Slot((n, config.width)), cache, public
        layer = fresh_layer if n == 1 else dense_layer
        return self.session.compile(f"layer {self._network.kind(i)}", partial(layer, config, plan), slots)
