"""Whether two models speak of the same tokens: what a draft needs, whose tokens the target is asked about by their ids."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..errors import UserError
from ..models.config import DecoderConfig
from ..models.tokenizer import Tokenizer

_PROBE = "It's 2026: naïve 東京 cafés cost £3.50…\n\n\tdon't  STOP_here; x1=10**6 🙂 "
"""Text that tokenizers cut differently where their rules differ: digits, spaces, apostrophes, marks, scripts."""

_ADVICE = "a draft must have the target's tokenizer; give one that was trained with it"


@dataclass(frozen=True)
class _Parts:
    """tokens: id to text; merges in their order; special: ids of tokens that are found whole in a text."""

    tokens: dict[int, str]
    merges: list[tuple[str, str]]
    special: dict[int, str]


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> None:
    """Raise UserError, naming the first difference, unless both turn every text into the same ids.

    Compared are all tokens, all merges, the special tokens, and a text on which rules of splitting differ.
    """
    one, other = _parts(a), _parts(b)
    _same_ids("token", one.tokens, other.tokens)
    _same_ids("special token", one.special, other.special)
    for i, (left, right) in enumerate(zip(one.merges, other.merges, strict=False)):
        if left != right:
            raise UserError(f"merge {i} is {left} in one tokenizer and {right} in the other; {_ADVICE}")
    if len(one.merges) != len(other.merges):
        raise UserError(f"one tokenizer has {len(one.merges)} merges and the other {len(other.merges)}; {_ADVICE}")
    if a.encode(_PROBE) != b.encode(_PROBE):
        raise UserError(f"the tokenizers have the same tokens but split {_PROBE!r} differently; {_ADVICE}")


def same_rows(target: DecoderConfig, draft: DecoderConfig) -> None:
    """Raise UserError unless both models give as many logits: rows past the tokenizer's tokens count too."""
    a, b = target.vocabulary, draft.vocabulary
    if a != b:
        raise UserError(f"the target gives {a} logits and the draft {b}; give a draft with as many rows in its table")


def _parts(tokenizer: Tokenizer) -> _Parts:
    whole = json.loads(tokenizer.to_json())
    model, added = whole["model"], whole.get("added_tokens") or []
    vocabulary = model.get("vocab") or {}
    # a unigram model has a list of [text, score] where BPE and word pieces have a mapping
    tokens = {i: text for text, i in vocabulary.items()} if isinstance(vocabulary, dict) else _numbered(vocabulary)
    special = {token["id"]: token["content"] for token in added}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges") or []]
    return _Parts(tokens | special, merges, special)


def _numbered(vocabulary: list) -> dict[int, str]:
    return {i: f"{text} ({score})" for i, (text, score) in enumerate(vocabulary)}


def _same_ids(what: str, one: dict[int, str], other: dict[int, str]) -> None:
    for i in sorted(one.keys() | other.keys()):
        if one.get(i) != other.get(i):
            names = [f"{texts[i]!r}" if i in texts else "absent" for texts in (one, other)]
            raise UserError(f"{what} {i} is {names[0]} in one tokenizer and {names[1]} in the other; {_ADVICE}")
