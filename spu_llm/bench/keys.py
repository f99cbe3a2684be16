"""What the dealer sends for a prompt: keys of lookups (function secret sharing) and all of it, counted without running it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..dealer.dpf import key_bytes
from ..dealer.generator import message_bytes
from ..dealer.material import Looked, Specification
from ..dealer.table import ExponentialTable
from ..generation.assisted import AssistedDecoder
from ..progress import Progress, silent
from ..runtime import ProtocolConfig, Session
from .layer import LayerShape
from .prompt import calibrated, random_prompt, starts


@dataclass(frozen=True)
class Keys:
    """Bytes to the party that gets more, for all passes of a layer over a prompt; `lookup` counts keys of tables only."""

    tokens: int
    total: int
    lookup: int
    scores: int  # attention scores that were looked up, masked ones too
    passes: int

    def formula(self, of_token: float, of_score: float) -> float:
        """Bytes by a straight line in tokens and scores."""
        return of_token * self.tokens + of_score * self.scores


def bench_keys(shape: LayerShape, lengths: list[int], layers: int, progress: Progress = silent) -> dict[str, Any]:
    """Dealer bytes of one layer for prompts of `lengths` tokens, and of `layers` of them.

    Each key is counted in the specification of the program that would use it: this is what is sent, byte for byte. The two
    constants of `Keys.formula` come from the first two lengths; `formula_error` says how far it is off at each.
    """
    found = [_keys(shape, tokens) for tokens in progress(lengths, "counting keys", "prompt")]
    of_token, of_score = _line(found[0], found[1])
    return {
        "family": shape.family,
        "layers": layers,
        "bytes_a_token": of_token,
        "bytes_a_score": of_score,
        "prompts": [
            {
                **asdict(keys),
                "model_bytes": layers * keys.total,
                "formula_error": abs(keys.formula(of_token, of_score) - keys.total) / keys.total,
            }
            for keys in found
        ],
    }


def _keys(shape: LayerShape, tokens: int) -> Keys:
    prompt = random_prompt(shape, tokens)
    total = lookup = scores = 0
    with Session(ProtocolConfig()) as session:
        decoder = AssistedDecoder(session, prompt.decoder, calibrated(prompt), tokens)
        sizes = decoder.passes(tokens)
        decoder.set_up(1)
        for start, size in starts(sizes):
            decoder.length = start
            specification = decoder.layer_program(size, decoder.plan.blocks[0]).specification
            total += max(message_bytes(specification))
            lookup += _lookup_bytes(specification)
            scores += sum(prod(deal.shape) for deal in specification.deals if _is_exponential(deal))
    return Keys(tokens, total, lookup, scores, len(sizes))


def _lookup_bytes(specification: Specification) -> int:
    tables = [(prod(deal.shape), deal.table) for deal in specification.deals if isinstance(deal, Looked)]
    return round(sum(count * key_bytes(table.depth, table.payload_words) for count, table in tables))


def _is_exponential(deal: Any) -> bool:
    return isinstance(deal, Looked) and isinstance(deal.table, ExponentialTable)


def _line(a: Keys, b: Keys) -> tuple[float, float]:
    """Constants with which `formula` is exact at both."""
    determinant = a.tokens * b.scores - b.tokens * a.scores
    of_token = (a.total * b.scores - b.total * a.scores) / determinant
    return of_token, (a.tokens * b.total - b.tokens * a.total) / determinant
