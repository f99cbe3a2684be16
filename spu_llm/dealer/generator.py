"""The dealer's and the parties' side of material: run a specification, send what seeds do not give, put the words together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from . import dpf
from .material import Derived, Looked, Operand, Pointed, Specification, Uniform, shared_words
from .prg import Stream, derive_key

_CHUNK = 1 << 17  # words of expanded tables held at once: they stay in the cache


@dataclass(frozen=True)
class Dealt:
    """What the dealer makes for one run: a message for each party, and the operands that later runs build on."""

    messages: tuple[bytes, bytes]
    operands: dict[str, np.ndarray]


class Dealer:
    """The third party. Knows masks only: it never sees an input, a weight, an opening or an output.

    Run numbers must never repeat under one pair of keys: they are what makes every mask fresh (see `store.Counter`).
    """

    def __init__(self, keys: tuple[bytes, bytes]):
        self._keys = keys

    def deal(
        self,
        specification: Specification,
        run: int,
        operands: Mapping[str, np.ndarray] | None = None,
        publics: Mapping[str, int] | None = None,
    ) -> Dealt:
        """Material for one run. `operands` holds the masks that the specification names, `publics` numbers known to all."""
        streams = [run_stream(key, run) for key in self._keys]
        values: list[np.ndarray] = []
        sent: tuple[list[bytes], list[bytes]] = ([], [])
        balance = [0, 0]
        for deal in specification.deals:
            if isinstance(deal, Uniform):
                values.append(streams[0].words(deal.shape) + streams[1].words(deal.shape))
            elif isinstance(deal, Operand):
                values.append((operands or {})[deal.name])
            elif isinstance(deal, Derived):
                with np.errstate(over="ignore"):  # the ring wraps around; numpy warns of it in scalars only
                    made = deal.make(*(values[i] for i in deal.sources), *((publics or {})[name] for name in deal.publics))
                values.append(made)
                if deal.shared:
                    seeded, told = _sides(balance, deal.word_bytes * made.size)
                    seed_words = _seed_words(streams[seeded], made.size, deal.word_bytes)
                    sent[told].append((made.reshape(-1).astype(seed_words.dtype) - seed_words).tobytes())
            else:
                if isinstance(deal, Pointed):
                    correction = self._points(deal, deal.make(*(values[i] for i in deal.sources)), streams)
                else:
                    correction = self._tables(deal, values[deal.sources[0]], streams)
                values.append(np.empty(0, np.int64))
                for part in sent:
                    part.append(correction.to_bytes())
        return Dealt(
            (b"".join(sent[0]), b"".join(sent[1])),
            {name: values[key] for name, key in specification.keep},
        )

    @staticmethod
    def _tables(deal: Looked, mask: np.ndarray, streams: list[Stream]) -> dpf.Correction:
        point, payload = mask_position(deal, mask)
        n = len(point)
        roots = streams[0].seeds(n), streams[1].seeds(n)
        return dpf.generate(point, payload, deal.table.depth, roots)

    @staticmethod
    def _points(deal: Pointed, point: np.ndarray, streams: list[Stream]) -> dpf.Correction:
        roots = streams[0].seeds(point.size), streams[1].seeds(point.size)
        return dpf.generate(point.reshape(-1), np.ones((point.size, 1), np.int64), deal.depth, roots)


def mask_position(deal: Looked, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which segment minus each mask falls into [n], and the payload its place in the segment gives [n, payload_words]."""
    table = deal.table
    scaled = (-mask.reshape(-1) >> deal.place_shift) & ((1 << (table.place_bits + deal.table.depth)) - 1)
    return scaled >> table.place_bits, table.payload(scaled & ((1 << table.place_bits) - 1))


def receive(specification: Specification, party: int, key: bytes, run: int, message: bytes) -> np.ndarray:
    """A party's share of the material vector [specification.words] int64, from its key and the dealer's message.

    Raises ValueError if the message is not the one for this specification.
    """
    stream = run_stream(key, run)
    rest = memoryview(message)
    vector = np.empty(specification.words, np.int64)
    at, balance = 0, [0, 0]
    for deal in specification.deals:
        words = shared_words(deal)
        if not words:
            continue
        target = vector[at : at + words]
        at += words
        if isinstance(deal, Looked):
            rest = _expand(deal, party, stream, rest, target)
        elif isinstance(deal, Pointed):
            rest = _expand_points(deal, party, stream, rest, target)
        elif isinstance(deal, Derived):
            size = deal.word_bytes * words
            if _sides(balance, size)[1] != party:
                target[:] = _seed_words(stream, words, deal.word_bytes)
                continue
            if len(rest) < size:
                raise ValueError("the dealer's message is too short for this program")
            target[:] = np.frombuffer(rest[:size], _word(deal.word_bytes))
            rest = rest[size:]
        else:
            target[:] = stream.words((words,))
    if len(rest):
        raise ValueError("the dealer's message is too long for this program")
    return vector


def message_bytes(specification: Specification) -> tuple[int, int]:
    """Bytes the dealer sends to each party for one run."""
    total, balance = [0, 0], [0, 0]
    for deal in specification.deals:
        if isinstance(deal, Looked):
            key = dpf.Correction.size(prod(deal.shape), deal.table.depth, deal.table.payload_words)
            total = [each + key for each in total]
        elif isinstance(deal, Pointed):
            total = [each + dpf.Correction.size(prod(deal.shape), deal.depth, 1) for each in total]
        elif isinstance(deal, Derived) and deal.shared:
            size = deal.word_bytes * shared_words(deal)
            total[_sides(balance, size)[1]] += size
    return total[0], total[1]


def run_stream(key: bytes, run: int) -> Stream:
    """The randomness of one run at one party."""
    return Stream(derive_key(key, "run", run))


def _sides(balance: list[int], size: int) -> tuple[int, int]:
    """(the party whose share is from its seed, the party that is sent its share): whoever was sent less is sent more."""
    told = int(balance[1] < balance[0])
    balance[told] += size
    return 1 - told, told


def _word(size: int) -> np.dtype:
    """Type of a word of `size` bytes; its shares add up modulo 2^(8 size)."""
    return np.dtype(np.int64 if size == 8 else f"u{size}")


def _seed_words(stream: Stream, count: int, size: int) -> np.ndarray:
    """The next words of `size` bytes from a seed."""
    return stream.words(-(-count * size // 8)).view(_word(size))[:count]


def _expand(deal: Looked, party: int, stream: Stream, rest: memoryview, target: np.ndarray) -> memoryview:
    """Expand the keys of one lookup into `target`, a bounded number of elements at a time; returns what is left."""
    n, table = prod(deal.shape), deal.table
    depth, payload = deal.table.depth, table.payload_words
    roots = stream.seeds(n)
    size = dpf.Correction.size(n, depth, payload)
    correction = dpf.Correction.from_bytes(rest[:size], n, depth, payload)
    rows = target.reshape(n, table.segments, payload)
    for part in _chunks(n, table.words):
        spread = dpf.expand(party, roots[part], correction[part], depth, payload)
        rows[part] = spread if table.spread else table.rotate(spread, deal.modulus)
    return rest[size:]


def _expand_points(deal: Pointed, party: int, stream: Stream, rest: memoryview, target: np.ndarray) -> memoryview:
    """As `_expand`, of one-hot rows."""
    n = prod(deal.shape)
    roots = stream.seeds(n)
    size = dpf.Correction.size(n, deal.depth, 1)
    correction = dpf.Correction.from_bytes(rest[:size], n, deal.depth, 1)
    rows = target.reshape(n, deal.size)
    for part in _chunks(n, 1 << deal.depth):
        rows[part] = dpf.expand(party, roots[part], correction[part], deal.depth, 1)[:, : deal.size, 0]
    return rest[size:]


def _chunks(n: int, words: int) -> Iterator[slice]:
    step = max(1, _CHUNK // words)
    return (slice(start, start + step) for start in range(0, n, step))
