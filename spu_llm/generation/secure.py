"""Decoding between parties: the weights are the owner's secret, the tokens and the logits the client's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache, Window, cache_shape, window
from ..models.config import DecoderConfig, Params
from ..models.decoder import Decoder, path_name
from ..models.narrow import NarrowDecoder
from ..models.plain import prefix_cache
from ..progress import Progress, silent
from ..runtime import Program, ProtocolConfig, Session, Slot

_SMALLEST_WINDOW = 32  # cache rows looked at: this or half as much again, doubled as needed, so that few programs are compiled


class SecureDecoder:
    """A decoder whose weights, cache and activations are secret-shared in a session, on SPU's own functions or on narrowed ones.

    One program an (n, window) pair serves all layers, or all layers of a kind where functions are narrowed: it is compiled once
    and run on each layer's variables.
    `capacity` rows of cache are kept a layer; the first `len(prefix)` of them are computed by the owner in plaintext
    (the prefix is public) and shared.

    What each party learns: the client its logits, rounded to 2^-16; both the number of tokens in each pass and the
    positions; nothing else. No program of this class opens a value to everyone except SPU's own masked ones.

    Call `set_up` once, then `advance` for the prompt and for each token, or `generate`, which does that. Raises `UserError` for
    a capacity above the model's positions and where tokens do not fit the cache, ValueError for tokens outside the vocabulary.
    """

    def __init__(
        self, session: Session, decoder: Decoder, capacity: int, prefix: Sequence[int] = (), narrow: NarrowDecoder | None = None
    ) -> None:
        if capacity > decoder.config.positions:
            raise UserError(f"capacity {capacity}: the model has {decoder.config.positions} positions; lower generation.capacity")
        self.session = session
        self.decoder = decoder
        self._network = narrow or decoder
        self.capacity = capacity
        self.length = len(prefix)
        self._block_rows = vocabulary_block(decoder, session.protocol)
        self._table_blocks = -(-decoder.config.vocabulary // self._block_rows)
        self._params: dict[str, Any] = {}
        self._cache = [LayerCache(f"cache.{i}.keys", f"cache.{i}.values") for i in range(decoder.config.layers)]
        self._prefix = list(prefix)

    def set_up(self, prompt_tokens: int = 1, progress: Progress = silent, scored: Collection[int] = ()) -> None:
        """Share weights and prefix rows, and open the masked weights once, so that later passes send nothing for them.

        Programs for a prompt of `prompt_tokens`, and for passes of `scored` tokens whose logits are wanted, are compiled too; other
        lengths compile when they come.
        """
        with self.session.phase("setup"):
            self._share_weights(progress)
            self._share_cache(progress)
            self._warm_up(prompt_tokens, progress, scored)

    def advance(self, tokens: Sequence[int], last_only: bool = True) -> np.ndarray:
        """Append the client's tokens; the client gets the logits [1 or n, vocabulary] after the last or each of them.

        Online cost with SEMI2K, static weights: each product opens its activations only; the ids cost
        `V/b + b*width + b` ring elements a token for b = `vocabulary_block`, the logits 4 bytes each.
        """
        check_pass(tokens, self.decoder.config.vocabulary, self.length, self.capacity)
        count = len(tokens)
        padded = self._padded(count)
        self._embed([*tokens, *[tokens[-1]] * (padded - count)])  # one whose values are usual, as narrowed functions want them
        self._layers(padded)
        self.length += count
        return self._logits(padded, range(count - 1, count) if last_only else range(count))

    def score(self, tokens: Sequence[int]) -> None:
        """Append the client's tokens in one pass; the logits after each stay secret until `row` gives one to the client."""
        check_pass(tokens, self.decoder.config.vocabulary, self.length, self.capacity)
        count = len(tokens)
        self._embed(list(tokens))
        self._layers(count)
        self._run_logits(count, range(count))
        self.length += count

    def row(self, i: int) -> np.ndarray:
        """Give the client the logits [vocabulary] after token i of the last `score`, each party's share narrowed: 4 bytes each."""
        return self.session.receive_narrow("logits", self._logit_bits, i)[: self.decoder.config.vocabulary]

    @property
    def trust(self) -> str:
        """What secrecy rests on, in a line."""
        return self.session.protocol.trust

    @property
    def failure_probability(self) -> float:
        """Chance that a token is spoilt by a truncation."""
        return self.session.protocol.failure_probability

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; their cache rows are overwritten by what comes next."""
        if not len(self._prefix) <= length <= self.length:
            raise ValueError(f"cannot roll back from {self.length} to {length}")
        self.length = length

    # Set-up

    def _secrets(self) -> Params:
        """What the owner shares: the network's parameters, with tables as they are looked up and multiplied."""
        config, params = self.decoder.config, self.decoder.params
        table = padded_rows(self._fixed(params["embed"]["table"]), self._block_rows)
        embed = {**params["embed"], "table": table.reshape(-1, self._block_rows * config.width)}
        secrets = {"embed": embed, "layers": self._network.params["layers"], "final": self._network.params["final"]}
        if not config.tied_head:
            secrets["head"] = {"table": self._fixed(params["head"]["table"])}
        return secrets

    def _share_weights(self, progress: Progress) -> None:
        leaves, tree = jax.tree_util.tree_flatten_with_path(self._secrets())
        names = [path_name(path) for path, _ in leaves]
        for name, (_, value) in zip(progress(names, "sharing weights", "tensor"), leaves, strict=True):
            share = self.session.share_operand if name.endswith((".kernel", ".table")) else self.session.share
            share(name, value, "owner")
        self._params = jax.tree_util.tree_unflatten(tree, names)
        self._slots = jax.tree_util.tree_unflatten(tree, [Slot(v.shape, v.dtype) for _, v in leaves])

    def _share_cache(self, progress: Progress) -> None:
        cache = prefix_cache(self.decoder, self._prefix, self.capacity)
        for names, rows in zip(progress(self._cache, "sharing the prefix", "layer"), cache, strict=True):
            self.session.share(names.keys, np.asarray(rows.keys), "owner")
            self.session.share(names.values, np.asarray(rows.values), "owner")

    def _warm_up(self, prompt_tokens: int, progress: Progress, scored: Collection[int]) -> None:
        """Compile what the prompt and every later token need, then run one token through: opens every masked weight."""
        kept, self.length = self.length, min(self.length, self.capacity - 1)
        prompt = self._padded(prompt_tokens)
        sizes = {1, prompt, *scored}
        wanted: list[Callable[[], Any]] = [
            *(partial(self._embed_program, n) for n in sizes),
            *(partial(self._layer_program, n, self._window(n), i) for n in sizes for i in self._first_of_kind),
            *(partial(self._logits_program, n, 1) for n in {1, prompt}),
            *(partial(self._logits_program, n, n) for n in {*scored} - {1}),
        ]
        for compile_one in progress(wanted, "compiling", "program"):
            compile_one()
        self._embed([0])
        self._layers(1, lambda layers: progress(layers, "opening masked weights", "layer"))
        self._logits(1, range(1))
        self.length = kept

    # Passes

    def _padded(self, count: int) -> int:
        """Tokens in the pass that takes `count`: a power of two, so that few programs are compiled."""
        return min(bucket(count, 1), self.capacity - self.length)

    def _window(self, n: int) -> Window:
        """Where a pass of n tokens stands now."""
        return fitting_window(self.decoder.config, self.length, n, self.capacity)

    def _publish_window(self, place: Window) -> Window:
        """Make it public variables, and give their names."""
        names = Window(*(f"window.{field}" for field in Window._fields))
        for name, value in zip(names, place, strict=True):
            self.session.publish(name, value)
        return names

    def _embed(self, tokens: list[int]) -> None:
        """Look the client's ids up: a block of rows by one one-hot product, the row within it by another."""
        b = self._block_rows
        blocks, within = np.divmod(np.asarray(tokens), b)
        self.session.share("ids.block", np.eye(self._table_blocks, dtype=np.int64)[blocks], "client")
        self.session.share("ids.within", np.eye(b, dtype=np.int64)[within], "client")
        self.session.publish("start", np.int32(self.length))
        program = self._embed_program(len(tokens))
        self.session.run(program, (self._params["embed"], "ids.block", "ids.within", "start"), "x")

    def _layers(self, n: int, order: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
        place = self._window(n)
        names = self._publish_window(place)
        for i in order(range(len(self._cache))):
            program, kept = self._layer_program(n, place, i), self._cache[i]
            self.session.run(program, (self._params["layers"][i], "x", kept, names), ("x", kept))

    def _logits(self, n: int, rows: range) -> np.ndarray:
        self._run_logits(n, rows)
        return self.session.receive_narrow("logits", self._logit_bits)[:, : self.decoder.config.vocabulary]

    @property
    def _logit_bits(self) -> int:
        """Fraction bits of the secret logits: their product is not truncated."""
        return 2 * self.session.protocol.fraction_bits

    def _run_logits(self, n: int, rows: range) -> None:
        """The output layer for some of n positions: the secret variable `logits`."""
        part = "embed" if self.decoder.config.tied_head else "head"
        self.session.publish("first", np.int32(rows[0]))
        program = self._logits_program(n, len(rows))
        self.session.run(program, (self._params["final"], self._params[part]["table"], "x", "first"), "logits")

    # Programs

    def _embed_program(self, n: int) -> Program:
        b, width = self._block_rows, self.decoder.config.width

        def embed(params: Any, block: jax.Array, within: jax.Array, start: jax.Array) -> jax.Array:
            found = (block @ params["table"]).reshape(n, b, width)
            if b == 1:
                row = found[:, 0]
            elif n == 1:
                row = within @ found[0]
            else:
                row = jnp.sum(within[:, :, None] * found, axis=1)
            x = _as_real(row)
            if "positions" in params:
                x = x + jax.lax.dynamic_slice(params["positions"], (start, jnp.int32(0)), (n, width))
            return self._network.enter(x)

        ids = Slot((n, self._table_blocks), np.int64), Slot((n, b), np.int64)
        return self.session.compile("embed", embed, (self._slots["embed"], *ids, Slot((), np.int32, public=True)))

    @property
    def _first_of_kind(self) -> list[int]:
        """A layer of each kind."""
        kinds = [self._network.kind(i) for i in range(self.decoder.config.layers)]
        return [kinds.index(kind) for kind in sorted(set(kinds))]

    def _layer_program(self, n: int, place: Window, i: int) -> Program:
        """The program of layer i, which those of its kind share."""
        config = self.decoder.config
        cache = LayerCache(*(Slot(cache_shape(config, self.capacity)) for _ in range(2)))
        public = Window(*(Slot(value.shape, value.dtype, public=True) for value in place))
        slots = self._slots["layers"][i], Slot((n, config.width)), cache, public
        return self.session.compile(f"layer {self._network.kind(i)}", self._network.layer(i), slots)

    def _logits_program(self, n: int, count: int) -> Program:
        """Logits of `count` of n positions; the integer product keeps scale 2f, so nothing is truncated."""
        config = self.decoder.config

        def logits(final: Any, table: jax.Array, x: jax.Array, first: jax.Array) -> jax.Array:
            x = jax.lax.dynamic_slice(x, (first, jnp.int32(0)), (count, config.width))
            return _as_ring(self._network.final(final, x)) @ table.reshape(-1, config.width).T

        part = "embed" if config.tied_head else "head"
        slots = self._slots["final"], self._slots[part]["table"], Slot((n, config.width)), Slot((), np.int32, public=True)
        return self.session.compile(f"logits of {count}", logits, slots)

    def _fixed(self, table: np.ndarray) -> np.ndarray:
        """A table as ring integers: an integer product finds its opened static operand only in an integer variable."""
        return np.round(table.astype(np.float64) * 2.0**self.session.protocol.fraction_bits).astype(np.int64)


def check_pass(tokens: Sequence[int], vocabulary: int, taken: int, capacity: int) -> None:
    """Raise for tokens that are not in the vocabulary (ValueError) or do not fit a cache with `taken` rows taken (UserError)."""
    if not all(0 <= token < vocabulary for token in tokens) or not tokens:
        raise ValueError(f"{len(tokens)} tokens, which must be at least one and lie in the vocabulary")
    if taken + len(tokens) > capacity:
        raise UserError(f"{taken + len(tokens)} positions exceed the cache capacity {capacity}; raise generation.capacity")


def vocabulary_block(decoder: Decoder, protocol: ProtocolConfig) -> int:
    """Rows b a block of the id lookup: opens V/b + b*(width + 1) elements instead of V where products open inputs (SEMI2K).

    ABY3 and CHEETAH pay for a product's outputs, so there one one-hot over the whole vocabulary is cheapest.
    """
    if protocol.name != "SEMI2K":
        return 1
    return max(1, round((decoder.config.vocabulary / decoder.config.width) ** 0.5))


def fitting_window(config: DecoderConfig, start: int, count: int, capacity: int) -> Window:
    """The window of `count` tokens from position `start`, over as few cache rows as two sizes an octave allow."""
    needed = start + count
    sizes = (bucket(needed, _SMALLEST_WINDOW), bucket(needed, _SMALLEST_WINDOW * 3 // 2))
    return window(config, start, count, min(*sizes, capacity))


def bucket(count: int, smallest: int) -> int:
    """The smallest of smallest, 2 * smallest, 4 * smallest, ... that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def padded_rows(table: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(table, ((0, -len(table) % multiple), (0, 0)))


def _as_ring(x: jax.Array) -> jax.Array:
    """The ring integer that holds a real (free under SPU)."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float64), jnp.int64)


def _as_real(x: jax.Array) -> jax.Array:
    """The real that a ring integer holds (free under SPU)."""
    return jax.lax.bitcast_convert_type(x, jnp.float64).astype(jnp.float32)
