"""Decoding with a dealer: the plugin's protocols for every layer, correlated randomness dealt for each program run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache, cache_shape, window
from ..models.calibration import Calibration
from ..models.decoder import Decoder, path_name
from ..models.fixed_block import (
    ANGLE_BITS,
    BITS,
    NORM_KERNEL_BITS,
    STREAM_BITS,
    Angles,
    BlockParams,
    block,
    conformant_columns,
    encode_angles,
    encode_layer,
    with_reference,
)
from ..models.folded import centred_rows, fold_layer
from ..models.plain import prefix_cache
from ..models.plan import plan_model
from ..models.plan_check import RangeReport
from ..primitives.attention import Place, RowCache
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, encode
from ..primitives.norm import encode_phi, normalised, rounded_phi
from ..primitives.truncate import truncate
from ..progress import Progress, silent
from ..runtime import Session, Slot
from ..runtime.assisted import TRUST, Assisted, Call, DealtProgram, OperandSlot
from ..runtime.supply import Supply
from .cache_rows import CacheRows
from .secure import check_pass, fitting_window, padded_rows, vocabulary_block

TABLE_BITS = 19
"""Fraction bits of the embedding table, which is also the output layer's where they are tied."""
LOGIT_BITS = BITS + TABLE_BITS

_PASS = 128  # tokens of one pass at most: messages hardly count then, and programs compile in seconds
_SCORES = 1 << 20  # of one layer in one pass at most: their tables take half a KB each


class AssistedDecoder:
    """A decoder whose weights, cache and activations are secret-shared, run by dealer protocols in a SEMI2K session.

    Interface and meaning as `SecureDecoder`. `calibration` chooses the tables (see `calibration_for`), `ranges` says how it fared.
    Material is dealt in this process as it is needed, unless `supply` has it; `prefix_rows` are the prefix' cache rows where they
    were computed before. A value that leaves its table makes a pass raise `UserError`, and its tokens count as not given.

    With `appends` rows that were taken back are not written again (see `CacheRows`), and `capacity` counts them too. What each
    party learns: the client its logits, rounded to 2^-16; both the number of tokens in each pass and the positions; the dealer
    these numbers and the model's shape. Everything opened to both is uniformly masked (docs/leakage.md).
    """

    def __init__(
        self,
        session: Session,
        decoder: Decoder,
        calibration: Calibration,
        capacity: int,
        prefix: Sequence[int] = (),
        ranges: RangeReport | None = None,
        supply: Supply | None = None,
        prefix_rows: Sequence[LayerCache] | None = None,
        appends: bool = False,
    ) -> None:
        if capacity > decoder.config.positions and not appends:
            raise UserError(f"capacity {capacity}: the model has {decoder.config.positions} positions; lower generation.capacity")
        self.session = session
        self.assisted = Assisted(session, supply)
        self.decoder = decoder
        self.capacity = capacity
        self.rows = CacheRows(len(prefix), appends)
        self.plan = plan_model(decoder.config, calibration)
        self.ranges = ranges
        self._calibration = calibration
        self._prefix = list(prefix)
        self._prefix_rows = prefix_rows
        self._block_rows = vocabulary_block(decoder, session.protocol)
        self._layers: list[Any] = []
        self._kinds: list[Any] = []  # of each layer; those of a kind share their programs
        self._layer_slots: dict[Any, Any] = {}
        self._programs: dict[Any, DealtProgram] = {}

    def set_up(self, prompt_tokens: int = 1, progress: Progress = silent, scored: Collection[int] = ()) -> None:
        """Mask and open the weights, share biases and prefix rows, compile what the prompt and later tokens need.

        `scored`: tokens of the passes that `score` will make.
        """
        with self.session.phase("setup"):
            self.place_weights(progress)
            prompt = self.passes(prompt_tokens)
            sizes = {1, prompt[0], *scored}
            wanted: list[Callable[[], Any]] = [
                *(partial(self._embed_program, n) for n in sizes),
                *(partial(self.layer_program, n, kind) for n in sizes for kind in self._layer_slots),
                *(partial(self._logits_program, (n, 1)) for n in {1, prompt[-1]}),
                *(partial(self._logits_program, (n, n)) for n in {*scored} - {1}),
            ]
            for compile_one in progress(wanted, "compiling", "program"):
                compile_one()

    def advance(self, tokens: Sequence[int], last_only: bool = True) -> np.ndarray:
        """Append the client's tokens; the client gets the logits [1 or n, vocabulary] after the last or each of them."""
        self._check_pass(tokens)
        start, count, found = self.length, len(tokens), []
        try:
            for size in self.passes(count):
                at = self.length - start
                self.embed(list(tokens[at : at + size]))  # no padding: its rows could leave their tables and void the pass
                self.run_layers(size)
                self.rows.append(size)
                if not last_only or self.length == start + count:
                    found.append(self._logits(size, range(size - 1, size) if last_only else range(size)))
        except UserError:
            self.rows.take_back(start)  # what the passes wrote is void
            raise
        return np.concatenate(found)

    def score(self, tokens: Sequence[int]) -> None:
        """Append the client's tokens in one pass; the logits after each stay secret until `row` gives one to the client."""
        self._check_pass(tokens)
        self.embed(list(tokens))
        self.run_layers(len(tokens))
        self._run_logits(len(tokens), range(len(tokens)))
        self.assisted.check_ranges()
        self.rows.append(len(tokens))

    def row(self, i: int) -> np.ndarray:
        """Give the client the logits [vocabulary] after token i of the last `score`, each party's share narrowed: 4 bytes each."""
        return self.session.receive_narrow("logits", LOGIT_BITS, i)[: self.decoder.config.vocabulary]

    def passes(self, count: int) -> list[int]:
        """Tokens of each pass that takes a part of `count`, so that the material of one pass of a layer fits memory."""
        sizes: list[int] = []
        end = self.rows.written + count
        while (start := self.rows.written + sum(sizes)) < end:
            size = min(end - start, _PASS)
            width = fitting_window(self.decoder.config, start, size, self.capacity).mask.shape[1]
            sizes.append(max(1, min(size, _SCORES // (self.decoder.config.heads * width))))
        return sizes

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.rows.length

    @length.setter
    def length(self, value: int) -> None:
        self.rows = CacheRows(value)

    def _check_pass(self, tokens: Sequence[int]) -> None:
        check_pass(tokens, self.decoder.config.vocabulary, self.rows.written, self.capacity)

    @property
    def trust(self) -> str:
        """What secrecy rests on, in a line."""
        return TRUST

    @property
    def failure_probability(self) -> float:
        """Chance that a token is spoilt by a truncation: none, while every value keeps the bound of its site (see `truncate`)."""
        return 0.0

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on. What takes their rows does so under new masks."""
        if not len(self._prefix) <= length <= self.length:
            raise ValueError(f"cannot roll back from {self.length} to {length}")
        self.rows.take_back(length)

    # Set-up

    def place_weights(self, progress: Progress = silent) -> None:
        """Mask and open the weights and the prefix rows, share the biases."""
        self._mask_layers(progress)
        self._mask_tables()
        self._mask_cache(progress)

    def _mask_layers(self, progress: Progress) -> None:
        config = self.decoder.config
        plan, references = self.plan, self._calibration.references
        everything = list(zip(self.decoder.params["layers"], plan.blocks, plan.phis, references, strict=True))
        for i, (params, tables, phis, reference) in enumerate(progress(everything, "masking weights", "layer")):
            folded = fold_layer(config, params)
            learned = self._calibration.reference == "learned"
            encoded = encode_layer(with_reference(folded, reference) if learned else folded, tables.norm, phis)
            placed = {field: self._place(f"layers.{i}.{field}", value) for field, value in encoded._asdict().items()}
            self._layers.append(BlockParams(**{field: name for field, (name, _) in placed.items()}))
            self._kinds.append(tables)
            self._layer_slots[tables] = BlockParams(**{field: slot for field, (_, slot) in placed.items()})

    def _place(self, name: str, value: Any) -> tuple[Any, Any]:
        """A kernel or a norm's phi as a masked operand, a bias as a share: the tree of its names and of its slots."""
        if value is None:
            return None, None
        if name.endswith(("bias", "slopes")):
            self.session.share(name, value.raw, "owner")
            return value.with_raw(name), value.with_raw(Slot(value.shape, np.int64))
        operand = self.assisted.mask_operand(name, value.raw, "owner", transposed=True)
        return value.with_raw(operand), value.with_raw(OperandSlot(name.rsplit(".", 1)[-1], value.shape, transposed=True))

    def _mask_tables(self) -> None:
        """The embedding (and output) table, positions, and the final norm's phi and gain."""
        config, params = self.decoder.config, self.decoder.params
        b = self._block_rows
        rows = padded_rows(centred_rows(config, params["embed"]["table"]), b)
        blocks = encode(rows.reshape(-1, b * config.width), TABLE_BITS)
        shared = config.tied_head and config.family == "llama"
        table = self.assisted.mask_operand("table", blocks, "owner", transposed=not shared)  # a row is found three times faster so
        turned = self.assisted.turn(table, blocks, "owner") if shared else table
        self._rows_table = Fixed(turned, TABLE_BITS), Fixed(OperandSlot("table", blocks.shape, transposed=True), TABLE_BITS)
        norm = params["final"]["norm"]
        weight_bits = self.plan.final.weight_bits(STREAM_BITS)
        self._phi = self._encoded("phi", encode_phi(self.plan.final_phi, weight_bits), weight_bits)
        gain = np.asarray(norm["scale"], np.float64) * rounded_phi(self.plan.final_phi, weight_bits)
        self._gain = self._operand("gain", gain, NORM_KERNEL_BITS)
        head = np.asarray(self.decoder.head_table, np.float64)
        as_table = Fixed(table, TABLE_BITS), Fixed(OperandSlot("table", blocks.shape), TABLE_BITS)
        self._head = as_table if shared else self._operand("head", head, TABLE_BITS)
        self._positions = "positions" in params["embed"]
        if self._positions:
            self.session.share("positions", encode(centred_rows(config, params["embed"]["positions"]), STREAM_BITS), "owner")
        self._final_bias = "bias" in norm
        if self._final_bias:
            self.session.share("final_bias", encode(np.asarray(norm["bias"]), STREAM_BITS), "owner")

    def _operand(self, name: str, value: np.ndarray, bits: int) -> tuple[Fixed, Fixed]:
        return self._encoded(name, encode(value, bits), bits)

    def _encoded(self, name: str, raw: np.ndarray, bits: int) -> tuple[Fixed, Fixed]:
        return Fixed(self.assisted.mask_operand(name, raw, "owner"), bits), Fixed(OperandSlot(name, raw.shape), bits)

    def _mask_cache(self, progress: Progress) -> None:
        cache = prefix_cache(self.decoder, self._prefix, self.capacity, self._prefix_rows)
        self._cache = []
        for i, rows in enumerate(progress(cache, "sharing the prefix", "layer")):
            kept = [
                self.assisted.mask_operand(f"cache.{i}.{part}", encode(value, BITS), "owner", grows=True)
                for part, value in zip(("keys", "values"), rows, strict=True)
            ]
            names = (Fixed(name, BITS, self._row_modulus(part)) for name, part in zip(kept, ("keys", "values"), strict=True))
            self._cache.append(RowCache(*names))

    def _row_modulus(self, part: str) -> int:
        """New rows are right modulo this: what is left of the ring after truncating them while they are opened."""
        rotated = part == "keys" and self.decoder.config.rope_base is not None
        return 64 - (2 * BITS + (ANGLE_BITS if rotated else 0) - BITS)

    # Passes

    def embed(self, tokens: list[int]) -> None:
        """Look the client's ids up: a block of rows by one one-hot product, the row within it by another."""
        b, blocks = self._block_rows, self._rows_table[1].shape[0]
        outer, within = np.divmod(np.asarray(tokens), b)
        self.session.share("ids.block", np.eye(blocks, dtype=np.int64)[outer], "client")
        self.session.share("ids.within", np.eye(b, dtype=np.int64)[within], "client")
        self.session.publish("start", np.int64(self.length))
        names = [self._rows_table[0], "ids.block", "ids.within", "start", *(["positions"] if self._positions else [])]
        self.assisted.run(self._embed_program(len(tokens)), names, ["x"])

    def run_layers(self, n: int) -> None:
        """All layers on the n tokens that were embedded; the caller counts them to `length`."""
        where = self._where(n)
        names = jax.tree_util.tree_map_with_path(lambda path, _: "window." + path_name(path), where)
        for name, value in zip(*map(jax.tree_util.tree_leaves, (names, where)), strict=True):
            self.session.publish(name, value)
        self._run_layers(n, names)

    def _run_layers(self, n: int, where: Sequence[Any]) -> None:
        self.assisted.run_all([self._call(i, n, where) for i in range(len(self._layers))])

    def _call(self, i: int, n: int, where: Sequence[Any]) -> Call:
        """The run of layer i on n tokens; `where` names what is public of their positions."""
        cache = self._cache[i]
        arguments, results = [self._layers[i], "x", cache, *where], ["x", cache.keys.raw, cache.values.raw]
        return Call(self.layer_program(n, self._kinds[i]), arguments, results, {"start": self.rows.written})

    def _logits(self, n: int, rows: range) -> np.ndarray:
        self._run_logits(n, rows)
        self.assisted.check_ranges()
        found = self.session.receive_narrow("logits", LOGIT_BITS)
        return found[:, : self.decoder.config.vocabulary]

    def _run_logits(self, n: int, rows: range) -> None:
        """The output layer for some of n positions: the secret variable `logits`, with LOGIT_BITS fraction bits."""
        self.session.publish("first", np.int64(rows[0]))
        bias = ["final_bias"] if self._final_bias else []
        names = [self._gain[0], self._phi[0], self._head[0], "x", "first", *bias]
        self.assisted.run(self._logits_program((n, len(rows))), names, ["logits"])

    def _where(self, n: int) -> tuple[Place, Angles]:
        """What is public of n tokens' positions."""
        config, rows = self.decoder.config, self.rows
        width = fitting_window(config, rows.written, n, self.capacity).mask.shape[1]
        turned = window(config, self.length, n, width)
        columns = None
        if self._calibration.reference == "maxima":
            columns = rows.rows_of(conformant_columns(len(self._prefix), self.length, n), n)
        place = Place(np.int64(rows.written), rows.seen(n, width).astype(np.int64), columns)
        return place, encode_angles(turned.cos, turned.sin, self.length)

    # Programs

    def _compiled(self, key: Any, make: Callable[[], DealtProgram]) -> DealtProgram:
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _embed_program(self, n: int) -> DealtProgram:
        b, width = self._block_rows, self.decoder.config.width

        def embed(table: Fixed, outer: Any, within: Any, start: Any, positions: Any = None) -> Any:
            found = contract("nb,bm->nm", Fixed(outer, 0), table).reshape(n, b, width)
            row = contract("nb,nbd->nd", Fixed(within, 0), found).at_bits(STREAM_BITS)
            if positions is not None:
                row = row + Fixed(_rows_from(positions, start, n), STREAM_BITS)
            return row.raw

        table = self._rows_table[1]
        slots = [table, Slot((n, table.shape[0]), np.int64), Slot((n, b), np.int64), _public()]
        if self._positions:
            slots.append(Slot(self.decoder.params["embed"]["positions"].shape, np.int64))
        return self._compiled(("embed", n), lambda: self.assisted.compile("embed", embed, tuple(slots), (None,)))

    def layer_program(self, n: int, kind: Any) -> DealtProgram:
        """The program of n tokens of a layer of a kind at the present length."""
        x, cache, where = self._layer_inputs(n)
        keeps = (None, cache.keys.raw, cache.values.raw)
        run, name = self._layer_function(kind), f"layer {list(self._layer_slots).index(kind)}"
        slots = self._layer_slots[kind], x, cache, *where
        return self._compiled((name, n, where[0].mask.shape), lambda: self.assisted.compile(name, run, slots, keeps))

    def _layer_function(self, kind: Any) -> Callable:
        """A layer of a kind, of what `layer_program` has slots for."""
        return partial(block, self.decoder.config, kind)

    def _layer_inputs(self, n: int) -> tuple[Fixed, RowCache, tuple[Place, Angles]]:
        """Slots of n tokens' stream, of the cache, and of what is public of their positions."""
        shape = cache_shape(self.decoder.config, self.capacity)
        cache = RowCache(*(Fixed(OperandSlot(part, shape), BITS, self._row_modulus(part)) for part in ("keys", "values")))
        where = jax.tree_util.tree_map(lambda value: _public(np.shape(value)), self._where(n))
        return Fixed(Slot((n, self.decoder.config.width), np.int64), STREAM_BITS), cache, where

    def _logits_program(self, shape: tuple[int, int]) -> DealtProgram:
        n, count = shape
        config, plan = self.decoder.config, self.plan.final

        def logits(gain: Fixed, phi: Fixed, head: Fixed, x: Any, first: Any, bias: Any = None) -> Any:
            h = normalised(Fixed(_rows_from(x, first, count), STREAM_BITS), plan, phi)
            h = contract("nd,d->nd", h, gain, BITS)
            h = truncate(h, BITS) if bias is None else truncate(h + Fixed(bias, STREAM_BITS), BITS)
            table = head.reshape(-1, config.width)
            return contract("nd,vd->nv", h, table).raw

        slots = [self._gain[1], self._phi[1], self._head[1], Slot((n, config.width), np.int64), _public()]
        slots += [Slot((config.width,), np.int64)] if self._final_bias else []
        return self._compiled(("logits", shape), lambda: self.assisted.compile("logits", logits, tuple(slots), (None,)))


def _rows_from(x: Any, start: Any, count: int) -> Any:
    """`count` rows from a public position on."""
    return jax.lax.dynamic_slice(x, (start, jnp.zeros((), start.dtype)), (count, x.shape[1]))


def _public(shape: tuple[int, ...] = ()) -> Slot:
    return Slot(shape, np.int64, public=True)
