"""What Comet's revealed masks tell, setting by setting: masks of real text by a prepared file's predictors, attacks on them.

Plaintext, by whoever has the model. Masks are those of a dense run: what a sparse run leaves out changes later masks a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ..comet.activity import activity
from ..comet.attacks import (
    Masks,
    Rate,
    Renewal,
    confirm,
    confirm_against,
    identify,
    name_after_known,
    name_token,
    renewed_share,
    same_token,
)
from ..comet.blocks import best_of
from ..comet.gate import chosen
from ..comet.predictor import bucket
from ..comet.prepared import LayerSparsity, Prepared
from ..errors import UserError
from ..models.decoder import Decoder
from ..models.sequences import cut_sequences
from ..progress import Progress, silent

Count = Literal["constant", "rounded", "variable"]
COUNTS: tuple[Count, ...] = ("constant", "rounded", "variable")
"""Which blocks are computed of a token: those above the layer's threshold, filled up or cut to the same number for all tokens, as
sparse runs do it; or rounded up to whole buckets, the best others added; or exactly these. Heads: the best, as many for
all tokens; otherwise those above a score that as many have on average."""
PERIODS = (1, 4, 16, 64, None)
KNOWN = 8
"""Tokens of a request's beginning that are known, as those of a template are, for naming those after them."""
_UNKNOWN = 4  # the part of a text, one in so many tokens, that a partly right guess has from elsewhere


@dataclass(frozen=True)
class Amounts:
    """length: tokens of a text. victims: texts to attack. public: tokens the observer learns from, at most."""

    length: int = 128
    victims: int = 48
    public: int = 16384
    seed: int = 0


@dataclass(frozen=True)
class Scores:
    """Predictors' scores of texts: tokens [texts, tokens]; for each layer neurons [texts, tokens, blocks] and heads [texts, tokens,
    heads], None where all heads are computed."""

    tokens: np.ndarray
    neurons: list[np.ndarray]
    heads: list[np.ndarray | None]


def bench_leakage(
    decoder: Decoder,
    prefix: tuple[int, ...],
    prepared: Prepared,
    texts: tuple[np.ndarray, np.ndarray],
    amounts: Amounts,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`rows`: for each count of active blocks, with heads revealed or not, period and kind of renewal, the rates of all attacks.

    texts: public tokens and the victims' [n]. Raises UserError where they are too short, or longer than the model's positions.
    """
    random = np.random.default_rng(amounts.seed)
    public, victims = _texts(decoder, prefix, texts, amounts)
    kinds = {"public": public, "victims": victims, "word": _one_word(victims, public, random), "part": _part_unknown(victims)}
    scores = {}
    for name in progress(list(kinds), "reading", "text"):
        scores[name] = read_scores(decoder, prefix, prepared, kinds[name])
    limits = _head_limits(prepared.layers, scores["public"])
    counts = COUNTS if all(layer.threshold is not None for layer in prepared.layers) else COUNTS[:1]
    rows: list[dict[str, Any]] = []
    shares: dict[str, list[float]] = {}
    for count in progress(list(counts), "attacking", "count"):
        masks = {name: _masks(prepared.layers, found, count, limits) for name, found in scores.items()}
        shares[count] = [float(group.mean()) for group in masks["victims"].groups]
        rows += _settings(count, masks, random)
    return {
        "public_tokens": int(public.size),
        "texts": len(victims),
        "tokens": victims.shape[1],
        "known_tokens": KNOWN,
        "layers": len(prepared.layers),
        "blocks": prepared.layers[0].blocks,
        "heads": decoder.config.heads,
        "active_share": shares,
        "rows": rows,
    }


# Texts and their masks


def _texts(
    decoder: Decoder, prefix: tuple[int, ...], texts: tuple[np.ndarray, np.ndarray], amounts: Amounts
) -> tuple[np.ndarray, np.ndarray]:
    """Public and victims' texts [count, length]."""
    longest = decoder.config.positions - len(prefix)
    if amounts.length > longest:
        raise UserError(f"--length {amounts.length}: the model has {longest} positions after its prefix; give at most that")
    public, victims = (cut_sequences(ids, amounts.length) for ids in texts)
    if min(len(public), len(victims)) < 8:
        raise UserError(
            f"--text: gives {len(public)} public texts and {len(victims)} of victims of {amounts.length} tokens; give longer "
            "files, for 8 each at least"
        )
    spread = np.linspace(0, len(victims) - 1, min(amounts.victims, len(victims))).astype(int)
    return public[: max(8, amounts.public // amounts.length)], victims[spread]


def _one_word(victims: np.ndarray, public: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The victims' texts with one token each, anywhere, exchanged for another one of public text."""
    changed, (texts, length) = victims.copy(), victims.shape
    for row, place in zip(changed, random.integers(length, size=texts), strict=True):
        row[place] = random.choice(public[public != row[place]])
    return changed


def _part_unknown(victims: np.ndarray) -> np.ndarray:
    """The victims' texts with another text's beginning."""
    known = victims.shape[1] // _UNKNOWN
    return np.concatenate([np.roll(victims, 1, axis=0)[:, :known], victims[:, known:]], 1)


def read_scores(decoder: Decoder, prefix: tuple[int, ...], prepared: Prepared, texts: np.ndarray) -> Scores:
    """Scores of texts [count, n], each read after the model's prefix, whose own tokens are computed ahead and left out."""
    begun = np.tile(np.asarray(prefix, np.int32), (len(texts), 1))
    neurons: list[np.ndarray] = []
    heads: list[np.ndarray | None] = []
    before: np.ndarray | None = None
    for layer, found in zip(
        prepared.layers, activity(decoder, np.concatenate([begun, texts], 1).astype(np.int32), len(prefix)), strict=True
    ):
        neurons.append(np.asarray(layer.neurons.scores(found.normed)).reshape(*texts.shape, -1))
        scored = None if layer.heads is None or before is None else np.asarray(layer.heads.scores(before))
        heads.append(None if scored is None else scored.reshape(*texts.shape, -1))
        before = found.normed
    return Scores(texts, neurons, heads)


def _masks(layers: Sequence[LayerSparsity], scores: Scores, count: Count, limits: Sequence[float]) -> Masks:
    """Blocks of neurons, then heads of those layers that choose among them."""
    neurons = [_blocks(layer, found, count) for layer, found in zip(layers, scores.neurons, strict=True)]
    heads = [
        best_of(_rows(found), layer.active_heads).reshape(found.shape) if count == "constant" else found > limit
        for layer, found, limit in zip(layers, scores.heads, limits, strict=True)
        if found is not None
    ]
    return Masks(scores.tokens, tuple(np.stack(group, 2) for group in (neurons, heads) if group))


def _blocks(layer: LayerSparsity, scores: np.ndarray, count: Count) -> np.ndarray:
    """What is computed of a layer's neurons, bool as scores [texts, tokens, blocks]."""
    limit = layer.threshold or 0.0
    if count == "constant":
        mask = np.zeros(_rows(scores).shape, bool)
        np.put_along_axis(mask, chosen(_rows(scores), limit, layer.active_blocks), True, 1)
        return mask.reshape(scores.shape)
    above, step = scores > limit, bucket(layer.blocks)
    if count == "variable":
        return above
    number = np.maximum(-(-above.sum(-1) // step), 1) * step
    return (-scores).argsort(-1, kind="stable").argsort(-1, kind="stable") < number[..., None]


def _rows(scores: np.ndarray) -> np.ndarray:
    return scores.reshape(-1, scores.shape[-1])


def _head_limits(layers: Sequence[LayerSparsity], public: Scores) -> list[float]:
    """For each layer the score above which `active_heads` heads are in the mean of public text; 0 where none are chosen."""
    pairs = zip(layers, public.heads, strict=True)
    shares = [(found, 0.0 if found is None else layer.active_heads / found.shape[-1]) for layer, found in pairs]
    return [0.0 if found is None else float(np.quantile(found, 1 - share)) for found, share in shares]


# Attacks


def _settings(count: Count, masks: dict[str, Masks], random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """A row for heads revealed or not, each period and kind of renewal."""
    public, victims = masks["public"], masks["victims"]
    length = victims.tokens.shape[1]
    renewals = [Renewal(period) for period in PERIODS if period is None or period < length]
    renewals += [Renewal(period, partial=True) for period in PERIODS if period is not None and period < length]
    pairs = list(zip(public.groups, victims.groups, strict=True))
    identities = {renewal: [identify(*pair, renewal, random) for pair in pairs] for renewal in renewals}
    for groups in range(1, len(pairs) + 1):
        seen = {name: Masks(each.tokens, each.groups[:groups]) for name, each in masks.items()}
        token = name_token(seen["public"], seen["victims"], random)
        after = name_after_known(seen["public"], seen["victims"], KNOWN, PERIODS, random)
        for renewal in renewals:
            rates = {"token": token, "after": after.get(renewal.period), **_rates(renewal, seen, random)}
            rates |= _named(identities[renewal][:groups])
            yield {
                "count": count,
                "heads": groups > 1,
                "period": renewal.period,
                "partial": renewal.partial,
                "renewed_share": renewed_share(victims.groups, renewal, random),
                **{name: None if rate is None else asdict(rate) for name, rate in rates.items()},
            }


def _named(identities: Sequence[Rate]) -> dict[str, Rate | None]:
    """Identities of neuron blocks and, None where they are not revealed, of heads."""
    block, *heads = identities
    return {"block": block, "head": heads[0] if heads else None}


def _rates(renewal: Renewal, seen: dict[str, Masks], random: np.random.Generator) -> dict[str, Rate | None]:
    """What overlaps tell: of a right guess, of one that is right but for its beginning, of one word, of repeated tokens."""
    victims = seen["victims"]
    whole, part = (confirm(victims, seen[guess], renewal, random) for guess in ("victims", "part"))
    return {
        "pair": whole.pair,
        "among": whole.among,
        "part_pair": part.pair,
        "part_among": part.among,
        "word": confirm_against(victims, victims, seen["word"], renewal, random),
        "repeated": same_token(victims, renewal, random),
    }
