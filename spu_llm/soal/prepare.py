"""The owner's offline step: special tokens, prefix, ranges, references, the plan tried on text (SOAL).

All of it is plaintext float32 on the owner's machine: nobody else takes part, and no byte is sent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache, cache_shape
from ..models.calibration import calibrate
from ..models.calibration_file import plan_and_check, read_passages
from ..models.checkpoint import load_checkpoint
from ..models.config import DecoderConfig
from ..models.decoder import FAMILIES, Decoder
from ..models.gguf_file import open_gguf
from ..models.plain import PlainDecoder
from ..models.source import ModelConfig, cache_folder, content_digest
from ..models.tokenizer import Tokenizer
from ..progress import Progress, silent
from .maxima import by_choice, measure_maxima
from .prefix import Search, Trial
from .prepared import VERSION, Facts, Prepared, SpecialReport
from .special import Activations

_ENCODERS = frozenset(
    {"albert", "bart", "bert", "camembert", "deberta", "deberta_v2", "distilbert", "electra", "jina_bert_v2", "longformer", "mbart"}
    | {"modernbert", "mpnet", "mt5", "nomic_bert", "roberta", "t5", "t5encoder", "umt5", "xlm_roberta", "xlnet"}
)


@dataclass(frozen=True)
class Rule:
    """eta: how many times the median an activation is above to make its token special; longest: tokens of a prefix at most.

    fresh: measure all anew, whatever was kept.
    """

    eta: float = 8.0
    longest: int = 4
    fresh: bool = False


def prepare(model: ModelConfig, rule: Rule, progress: Progress = silent) -> Prepared:
    """Prepare a model, going on where an earlier run of the same was cut short. Its config's prefix is one of those tried.

    Raises UserError for a model without causal order, without a calibration text, or whose ranges exceed every table.
    """
    started, worked = time.perf_counter(), time.process_time()
    place = model.locate()
    refuse_encoder(place)
    checkpoint, identity = load_checkpoint(place), content_digest(place)
    decoder, tokenizer = checkpoint.decoder, checkpoint.tokenizer
    text, passages = read_passages(model, checkpoint)
    assert tokenizer is not None  # or there were no passages
    room = _room(model, decoder.config, rule)
    texts = [passage[:room] for passage in passages]
    activations = Activations(decoder, _kept(identity, rule), progress)
    special = find_prefix(activations, tokenizer, (text, texts), rule, model.prefix)
    prefix = special.chosen.prefix
    firsts = range(decoder.config.vocabulary)
    learned = calibrate(decoder, texts, prefix, progress, firsts)
    maxima = measure_maxima(decoder, texts, prefix, learned, progress)
    if maxima.choice.reference != "learned":  # then its ranges must hold for the first tokens too
        maxima = measure_maxima(decoder, texts, prefix, learned, progress, firsts)
    calibration = by_choice(learned, maxima)
    ranges = plan_and_check(decoder, calibration, texts, prefix, progress)
    facts = Facts(
        model=model.name,
        checkpoint=identity,
        text=hashlib.sha256(text.encode()).hexdigest(),
        prefix=prefix,
        prefix_text=tokenizer.decode(prefix),
        layers=calibration.layers,
        final_squares=calibration.final_squares,
        tokens=calibration.tokens,
        ranges=ranges,
        special=special,
        maxima=maxima,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - worked,
    )
    return Prepared(facts, calibration.references, prefix_rows(decoder, prefix))


def _room(model: ModelConfig, config: DecoderConfig, rule: Rule) -> int:
    """Positions that are left for a passage after the longest prefix."""
    for token in model.prefix:
        if not 0 <= token < config.vocabulary:
            raise UserError(
                f"model {model.name}: token {token} of its prefix is outside the vocabulary of {config.vocabulary}; correct prefix"
            )
    room = config.positions - max(rule.longest, len(model.prefix))
    if room < 1:
        raise UserError(f"--longest {rule.longest}: the model has {config.positions} positions; give less")
    return room


def _kept(checkpoint: str, rule: Rule) -> Path:
    """The folder of what was measured of a checkpoint."""
    folder = cache_folder() / f"soal-{checkpoint[:16]}"
    if rule.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def find_prefix(
    activations: Activations, tokenizer: Tokenizer, text: tuple[str, list[list[int]]], rule: Rule, given: tuple[int, ...] = ()
) -> SpecialReport:
    """The search for a prefix, with what the report shows of it. text: as a whole, and its passages' tokens."""
    whole, texts = text
    frequent = [token for token, _ in Counter(tokenizer.encode(whole)).most_common()]
    search = Search(
        activations=activations,
        texts=texts,
        control=tokenizer.control_tokens,
        frequent=frequent,
        text_of=lambda token: tokenizer.decode([token]),
        eta=rule.eta,
        longest=rule.longest,
        given=given,
    )
    chosen = search.run()
    own = activations.of_prefix(chosen.prefix)
    before, after = (by_position(activations.of(prefix, texts, "the text"), texts) for prefix in ((), chosen.prefix))
    return SpecialReport(rule.eta, tuple(search.trials), chosen, _pairs(own), _pairs(before), _pairs(after))


def by_position(maxima: np.ndarray, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """[longest, 2] the largest M at each position of the passages."""
    position = np.concatenate([np.arange(len(text)) for text in texts])
    found = np.zeros((position.max() + 1, maxima.shape[1]), maxima.dtype)
    np.maximum.at(found, position, maxima)
    return found


def prefix_rows(decoder: Decoder, prefix: Sequence[int]) -> tuple[LayerCache, ...]:
    """Keys and values of the prefix's positions, [prefix, kv_heads, head_width] in each layer."""
    if not prefix:
        none = np.zeros(cache_shape(decoder.config, 0), np.float32)
        return tuple(LayerCache(none, none) for _ in range(decoder.config.layers))
    plain = PlainDecoder(decoder, len(prefix))
    plain.advance(prefix)
    return tuple(LayerCache(np.asarray(rows.keys), np.asarray(rows.values)) for rows in plain.cache)


def default_path(model: ModelConfig, rule: Rule) -> Path:
    """Where a model's prepared file is kept: named after its files, text and prefix, and the rule."""
    text = b"" if model.calibration is None or not model.calibration.is_file() else model.calibration.read_bytes()
    parts = [VERSION, content_digest(model.locate()), hashlib.sha256(text).hexdigest(), rule.eta, rule.longest, model.prefix]
    return cache_folder() / f"soal-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.safetensors"


def refuse_encoder(checkpoint: Path) -> None:
    """Raise UserError for a model whose positions see what comes after them: nothing here applies to it."""
    kind, both = _kind(checkpoint)
    if kind.replace("-", "_") in _ENCODERS or both:
        raise UserError(
            f"{checkpoint}: a model of type {kind} has an encoder, in which every position sees all others: no first position "
            "takes the outliers of the rest, so no prefix computed ahead can hold them; give a decoder-only model "
            f"({', '.join(sorted(FAMILIES))})"
        )


def _kind(checkpoint: Path) -> tuple[str, bool]:
    """What type of model a checkpoint says it is, and whether it says that it has an encoder; ("", False) if unreadable."""
    if checkpoint.is_file():
        fields = open_gguf(checkpoint).fields if checkpoint.suffix == ".gguf" else {}
        return str(fields.get("general.architecture", "")), False
    try:
        config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        heads = [str(name) for name in config.get("architectures") or []]
        masked = any(name.endswith(("ForMaskedLM", "EncoderModel")) for name in heads)
        return str(config.get("model_type", "")), bool(config.get("is_encoder_decoder")) or masked
    except (OSError, ValueError, AttributeError, TypeError):
        return "", False  # loading it says what is wrong


def _pairs(values: np.ndarray) -> tuple[tuple[float, float], ...]:
    return tuple((float(a), float(b)) for a, b in values)


__all__ = ["Rule", "Trial", "default_path", "prepare", "refuse_encoder"]
