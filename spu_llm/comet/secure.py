"""Sparse decoding between the parties alone, by SPU's own operations: as `SecureDecoder`, with heads and neurons in secret orders.

An order of heads and of blocks of neurons is the product of a permutation of each party, and a renewal multiplies new ones on. So
no party can tell a block from its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..generation.secure import SecureDecoder
from ..models.cache import LayerCache, Window, cache_shape
from ..models.config import Params
from ..primitives.stock import as_real, as_ring
from ..progress import Progress, silent
from ..runtime import Program, Session, Slot
from .network import SparseNetwork
from .orders import ORDERS, forget_opened, keep_opened, share_orders
from .renewal import SHUFFLE, Renewing, active_heads


class SparseSecureDecoder(Renewing, SecureDecoder):
    """An OPT decoder that computes predicted heads and blocks of neurons, in new orders every `renew` tokens.

    What each party learns beyond `SecureDecoder`'s: in every layer, for every token, which blocks are active, and in passes of one
    token which heads, named by their places in the present secret order; how many is constant (docs/leakage.md). On CHEETAH blocks
    in passes of one token only, and no heads (joint_sparse.py).
    """

    def __init__(
        self, session: Session, network: SparseNetwork, capacity: int, prefix: Sequence[int] = (), renew: int | None = None
    ):
        super().__init__(session, network.decoder, capacity, prefix, network)  # type: ignore[arg-type]
        self._plans = network.plans
        self.renew_after = renew
        self._opened: set[tuple[int, str]] = set()

    def renew(self, progress: Progress = silent) -> None:
        """Put heads and blocks of every layer into new secret orders."""
        self._since = 0
        with self.session.phase(SHUFFLE):
            work = [(i, kind) for i, layer in enumerate(self._params["layers"]) for kind in ("heads", "neurons") if kind in layer]
            for i, kind in progress(work, "shuffling", "part"):
                self._shuffle(i, kind)

    def _share_cache(self, progress: Progress) -> None:
        super()._share_cache(progress)
        self.renew(progress)

    def _warm_up(self, prompt_tokens: int, progress: Progress, scored: Collection[int]) -> None:
        super()._warm_up(prompt_tokens, progress, scored)
        self.renew(progress)  # its token is known to all, and has shown what is active in the order so far

    def _shuffle(self, i: int, kind: str) -> None:
        names, slots = self._params["layers"][i][kind], self._slots["layers"][i][kind]
        size = self.decoder.config.heads if kind == "heads" else slots["up_bias"].shape[0]
        cache = self._cache[i] if kind == "heads" else None
        share_orders(self.session, size)
        if (i, kind) in self._opened:
            forget_opened(self.session, names, slots)
        self._opened.add((i, kind))
        rows = None if cache is None else LayerCache(*(Slot(cache_shape(self.decoder.config, self.capacity)) for _ in range(2)))
        matrix = Slot((size, size), np.int64)
        program = self.session.compile(f"{SHUFFLE} {kind}", partial(_shuffled, size), (slots, rows, matrix, matrix))
        self.session.run(program, (names, cache, *ORDERS), (names, cache))
        keep_opened(self.session, names, slots)

    # Passes

    def advance(self, tokens: Sequence[int], last_only: bool = True) -> np.ndarray:
        self._count(len(tokens))
        return super().advance(tokens, last_only)

    def score(self, tokens: Sequence[int]) -> None:
        self._count(len(tokens))
        super().score(tokens)

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        every = np.broadcast_to(np.arange(self.decoder.config.heads), (n, self.decoder.config.heads))
        self.session.publish(active_heads(None), every.astype(np.int64))
        place = self._window(n)
        names = self._publish_window(place)
        for i in order(range(len(self._cache))):
            kept, following = self._cache[i], self._following(self._params, i)
            active = active_heads(i if i and self._plans[i - 1].next_heads else None)
            results = ("x", kept, *([] if following is None else [active_heads(i + 1)]))
            arguments = (self._params["layers"][i], following, "x", kept, active, names)
            self.session.run(self._layer_program(n, place, i), arguments, results)

    def _following(self, tree: Params, i: int) -> Params | None:
        """The second product of the next layer's heads, where layer i predicts them; of the tree of names or of slots."""
        if self._plans[i].next_heads is None:
            return None
        heads = tree["layers"][i + 1]["heads"]
        return {name: heads[name] for name in ("second", "second_bias")}

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        config = self.decoder.config
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        active = Slot((n, self._plans[i].heads), np.int64, public=True)
        following = self._following({"layers": self._slots["layers"]}, i)
        slots = self._slots["layers"][i], following, Slot((n, config.width)), cache, active, public
        return self.session.compile(f"layer {self._network.kind(i)}", self._network.layer(i), slots)


def _shuffled(size: int, parts: Params, cache: LayerCache | None, client: Any, owner: Any) -> tuple[Params, LayerCache | None]:
    """Every part, and the cache's heads, in the order of both parties' permutations."""
    order = client @ owner

    def moved(x: Any, axis: int) -> Any:
        lead = x.shape[:axis]
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        raw = jnp.moveaxis((x if whole else as_ring(x)).reshape(*lead, size, -1), axis, 0)
        rows = jnp.moveaxis((order @ raw.reshape(size, -1)).reshape(raw.shape), 0, axis).reshape(x.shape)
        return rows if whole else as_real(rows).astype(x.dtype)

    found = {name: moved(x, _axis(name, x)) for name, x in parts.items()}
    return found, None if cache is None else LayerCache(*(moved(x, 1) for x in cache))


def _axis(name: str, x: Any) -> int:
    """Where a part's blocks are: behind the inputs of dense kernels that make outputs in blocks, else in front."""
    return int(name == "second" or (x.ndim == 2 and name in ("query", "key_value", "up")))
