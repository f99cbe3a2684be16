"""T5 between parties: the prompt is encoded once, its keys and values stay secret, and the decoder runs as any other does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from spu.experimental import drop_cached_var

from ..models.cache import LayerCache, Window, cache_shape
from ..models.config import Params
from ..models.t5 import T5, Cross, cross_shapes, decoder_buckets, encoder_buckets, relative_bias
from ..progress import Progress
from ..runtime import Program, Session, Slot
from .secure import SecureDecoder, bucket


class SecureSeq2Seq(SecureDecoder):
    """A T5 whose weights, caches and activations are secret-shared in a session, on SPU's own functions.

    `encode` takes the client's prompt; then `advance`, `score`, `row` and `roll_back` are `SecureDecoder`'s, on the decoder's
    tokens, of which the first is the config's `start_token`. Another `encode` begins another text.

    What the encoded prompt gives the decoder's layers is multiplied in every pass: with SEMI2K it is opened once, masked, and the
    mask is given up with the next prompt.

    What each party learns: the client its logits, rounded to 2^-16; both the number of tokens of the prompt and of each pass, and
    the positions; nothing else.
    """

    decoder: T5

    def __init__(self, session: Session, model: T5, capacity: int):
        super().__init__(session, model, capacity)
        self._cross = [Cross(f"cross.{i}.keys", f"cross.{i}.values") for i in range(model.config.layers)]
        self._encoded = 0  # tokens of the prompt with its padding; 0 before there is one

    def encode(self, tokens: Sequence[int]) -> None:
        """Take the client's prompt, in one pass of the encoder; what was decoded before is forgotten.

        Keys and values for the decoder's layers stay in the parties; with SEMI2K each layer's are opened, masked, in 4 messages of
        8 bytes (16 in FM128) an element.
        """
        count = len(tokens)
        if not all(0 <= token < self.decoder.config.vocabulary for token in tokens) or not count:
            raise ValueError(f"{count} tokens, which must be at least one and lie in the vocabulary")
        self.length = 0
        padded = _padded_prompt(count)
        self._embed([*tokens, *[tokens[-1]] * (padded - count)])
        self.session.publish("shown", np.arange(padded) < count)
        self._relative("encoder", encoder_buckets(self.decoder.config, padded))
        for params in self._params["encoder"]["layers"]:
            self.session.run(self._encoder_program(padded), (params, "x", "shown", "bias"), "x")
        self._show(padded)

    def advance(self, tokens: Sequence[int], last_only: bool = True) -> np.ndarray:
        """As `SecureDecoder.advance`. Raises ValueError before the first `encode`."""
        self._check_prompt()
        return super().advance(tokens, last_only)

    def score(self, tokens: Sequence[int]) -> None:
        """As `SecureDecoder.score`. Raises ValueError before the first `encode`."""
        self._check_prompt()
        super().score(tokens)

    def _check_prompt(self) -> None:
        if not self._encoded:
            raise ValueError("there is no prompt yet: encode one first")

    # Set-up

    def _secrets(self) -> Params:
        params = self.decoder.params
        return super()._secrets() | {part: params[part] for part in ("encoder", "cross", "relative")}

    def _share_cache(self, progress: Progress) -> None:
        zeros = np.zeros(cache_shape(self.decoder.config, self.capacity), np.float32)
        for names in progress(self._cache, "making the cache", "layer"):
            for name in names:
                self.session.share(name, zeros, "owner")

    def _warm_up(self, prompt_tokens: int, progress: Progress, scored: Collection[int]) -> None:
        """Compile what a prompt of that length needs, then show the decoder an embedded one and run a token through."""
        padded = _padded_prompt(prompt_tokens)
        wanted: list[Callable[[], Any]] = [
            partial(self._embed_program, padded),
            partial(self._encoder_program, padded),
            partial(self._relative_program, (padded, padded)),
        ]
        for compile_one in progress(wanted, "compiling", "encoder program"):
            compile_one()
        self._embed([0] * padded)
        self.session.publish("shown", np.ones(padded, bool))
        self._show(padded)
        super()._warm_up(1, progress, scored)
        self._hide()

    # The prompt

    def _show(self, padded: int) -> None:
        """Give the decoder's layers what the last encoder layer left in `x`."""
        self._hide()
        program, final = self._cross_program(padded), self._params["encoder"]["final"]
        for names, params in zip(self._cross, self._params["cross"], strict=True):
            self.session.run(program, (final, params, "x"), names)
            for name, shape in zip(names, cross_shapes(self.decoder.config, padded), strict=True):
                self.session.keep_opened(name, Slot(shape))
        self._encoded = padded

    def _hide(self) -> None:
        """Give up the masks of the last prompt's keys and values."""
        if self._encoded and self.session.protocol.name == "SEMI2K":
            shapes = Cross(*map(Slot, cross_shapes(self.decoder.config, self._encoded)))
            program = self.session.compile("give up masks", partial(jax.tree_util.tree_map, drop_cached_var), (shapes,))
            for names in self._cross:
                self.session.run(program, (names,), names)
        self._encoded = 0

    # Passes

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        place = self._window(n)
        self._relative("decoder", decoder_buckets(self.decoder.config, self.length, *place.mask.shape))
        names = self._publish_window(place)
        for i in order(range(len(self._cache))):
            program, kept = self._layer_program(n, place, i), self._cache[i]
            arguments = self._params["layers"][i], "x", kept, names, "bias", self._cross[i], "shown"
            self.session.run(program, arguments, ("x", kept))

    def _relative(self, stack: str, buckets: np.ndarray) -> None:
        """What relative positions add to the scores of a stack's layers: local."""
        self.session.publish("buckets", buckets)
        program = self._relative_program(buckets.shape)
        self.session.run(program, (self._params["relative"][stack], "buckets"), "bias")

    # Programs

    def _relative_program(self, shape: tuple[int, ...]) -> Program:
        slots = self._slots["relative"]["encoder"], Slot(shape, np.int32, public=True)
        return self.session.compile("relative positions", relative_bias, slots)

    def _encoder_program(self, n: int) -> Program:
        config = self.decoder.config
        slots = Slot((n, config.width)), Slot((n,), np.bool_, public=True), Slot((config.heads, n, n))
        return self.session.compile("encoder", self.decoder.encoder_block, (self._slots["encoder"]["layers"][0], *slots))

    def _cross_program(self, n: int) -> Program:
        slots = self._slots["encoder"]["final"], self._slots["cross"][0], Slot((n, self.decoder.config.width))
        return self.session.compile("prompt's keys", self.decoder.cross, slots)

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        config = self.decoder.config
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        bias = Slot((config.heads, *place.mask.shape))
        cross = Cross(*map(Slot, cross_shapes(config, self._encoded)))
        shown = Slot((self._encoded,), np.bool_, public=True)
        slots = self._slots["layers"][i], Slot((n, config.width)), cache, public, bias, cross, shown
        return self.session.compile("decoder", self.decoder.layer(i), slots)


def _padded_prompt(count: int) -> int:
    """Tokens in the encoder's pass: a power of two or one and a half of one, so that few programs are compiled."""
    return min(bucket(count, 1), bucket(count, 3))
