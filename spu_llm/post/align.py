"""Alignment: a public draft learns a private model's probabilities on public text (POST, ICML 2025).

Run by the model's owner, who alone has both models. What comes out is a draft that its owner may publish: it tells about the
private model what an aligned draft tells, its tendencies on that text. The teacher's probabilities are the owner's secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import UserError
from ..models.checkpoint import Checkpoint, load_checkpoint
from ..models.decoder import Decoder
from ..models.losses import Batch, Teacher, distillation_loss, next_token_loss
from ..models.save import save_checkpoint
from ..models.sequences import Reader, cut_sequences, sequence_weights
from ..models.source import ModelConfig, content_digest
from ..models.tokenizer import need_tokenizer
from ..models.training import Kept, TrainingConfig, rows_of, train
from ..progress import Progress, silent
from .draft_length import expected_tokens
from .vocabulary import same_rows, same_tokenizer

LENGTHS = (4, 8, 16)
"""Draft lengths that reports speak of."""
_CHUNK = 8  # sequences of one file of teacher's probabilities


@dataclass(frozen=True)
class AlignConfig:
    """top_k: the teacher's tokens that are kept of each position, None for all of them, computed anew in every step.

    length: tokens of a sequence, the target's prefix included. learn: tokens of the text to learn from at most, None for all: the
    teacher is asked about each once, however often they are learned. held_out: tokens of it, about, on which acceptance is
    measured. rate: AdamW's largest learning rate. keep_table: leave the draft's embedding as it is, which is cheaper and does no
    harm where it is the target's. seed: which sequences are held out, and in what order the others are learned.
    """

    steps: int = 200
    top_k: int | None = 32
    batch: int = 4
    length: int = 128
    rate: float = 1e-4
    keep_table: bool = False
    learn: int | None = None
    held_out: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class Acceptance:
    """How a draft fares at temperature 1 on text, and how well both foresee the text.

    rate: sum over x of min(p(x), q(x)), averaged over positions. agreement: positions with the same best token, the rate of greedy
    decoding. tokens_per_round: (1 - a^(g+1)) / (1 - a) of the rate a, which takes acceptances for independent;
    along_text: the same expectation with each position's own rate, in the order of the text, where hard places stand together.
    """

    rate: float
    agreement: float
    positions: int
    tokens_per_round: dict[int, float]
    along_text: dict[int, float]
    target_perplexity: float
    draft_perplexity: float


def align(
    target: ModelConfig, draft: ModelConfig, texts: Sequence[Path], config: AlignConfig, out: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Distil and write `out`/model; the report has acceptance before and after, seconds and memory.

    `out` keeps what is needed to go on after a break: the teacher's probabilities and the training's state. Raises UserError
    where tokenizers differ or the text is too short.
    """
    private, public = load_checkpoint(target.locate()), load_checkpoint(draft.locate())
    same_tokenizer(need_tokenizer(private.tokenizer, target), need_tokenizer(public.tokenizer, draft))
    same_rows(private.decoder.config, public.decoder.config)
    ids = read_tokens(texts, private)
    learned, unseen = _split(cut_sequences(ids, config.length, target.prefix), config)
    weights = sequence_weights(config.length, target.prefix)
    seconds: dict[str, float] = {}
    clock = time.monotonic()
    before = acceptance(private.decoder, public.decoder, unseen, weights, progress)
    seconds["measuring_before"] = time.monotonic() - clock
    label = json.dumps([content_digest(target.locate()), config.top_k])
    teacher = _teacher(private.decoder, learned, config, Kept(out / "teacher", label), progress)
    seconds["teacher"] = teacher.prepare(progress)

    def batch_of(step: int) -> Batch:
        rows = rows_of(step, config.batch, len(learned), config.seed)
        return Batch(learned[rows], weights, teacher.of(rows))

    training = TrainingConfig(config.steps, config.rate, frozen=("table",) if config.keep_table else ())
    kept = Kept(out / "training.safetensors", json.dumps([label, _digest(learned), asdict(config)]))
    trained = train(public.decoder, batch_of, distillation_loss, training, kept, progress)
    seconds["training"] = trained.seconds
    clock = time.monotonic()
    after = acceptance(private.decoder, trained.decoder, unseen, weights, progress)
    seconds["measuring_after"] = time.monotonic() - clock
    save_checkpoint(out / "model", trained.decoder, public.tokenizer)
    return {
        "target": target.name,
        "draft": draft.name,
        "config": asdict(config),
        "tokens_of_text": len(ids),
        "tokens_learned": config.steps * config.batch * config.length,
        "loss": {"first": float(np.mean(trained.losses[:10])), "last": float(np.mean(trained.losses[-10:]))},
        "acceptance": {"before": asdict(before), "after": asdict(after)},
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cores": len(os.sched_getaffinity(0)),
    }


def _split(sequences: np.ndarray, config: AlignConfig) -> tuple[np.ndarray, np.ndarray]:
    """Sequences to learn from and such that are held out, drawn from all parts of the text."""
    held = max(1, round(config.held_out / config.length))
    if len(sequences) <= held:
        raise UserError(
            f"the text has {len(sequences)} sequences of {config.length} tokens, and {held} of them are held out; give more text"
        )
    order = np.random.default_rng(config.seed).permutation(len(sequences))
    learned = order[held:][: config.steps * config.batch]
    if config.learn is not None:
        learned = learned[: max(1, config.learn // config.length)]
    return sequences[learned], sequences[order[:held]]


def read_tokens(texts: Sequence[Path], checkpoint: Checkpoint) -> np.ndarray:
    """The tokens of all texts, one after the other. Raises UserError where one cannot be read."""
    assert checkpoint.tokenizer is not None
    ids: list[int] = []
    for path in texts:
        try:
            ids += checkpoint.tokenizer.encode(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {path}: cannot be read ({error}); give a text file") from None
    return np.asarray(ids, np.int32)


# Acceptance


def acceptance(
    target: Decoder, draft: Decoder, sequences: np.ndarray, weights: np.ndarray, progress: Progress = silent
) -> Acceptance:
    """Measured at every position of sequences [count, n] whose weight is not 0, two sequences at a time."""
    read_p, read_q = Reader(target), Reader(draft)
    rates, equal, losses = [], [], []
    for at in progress(range(0, len(sequences), 2), "measuring acceptance", "pass"):
        rows = sequences[at : at + 2]
        p, q = read_p(rows), read_q(rows)
        overlap, same = _overlap(p, q)
        rates.append(np.asarray(overlap)[:, weights > 0])
        equal.append(np.asarray(same)[:, weights > 0])
        losses += [[float(next_token_loss(logits, Batch(rows, weights))) for logits in (p, q)]] * len(rows)
    rate = np.concatenate(rates).astype(np.float64)
    mean = float(rate.mean())
    perplexities = np.exp(np.mean(losses, axis=0))
    return Acceptance(
        rate=mean,
        agreement=float(np.concatenate(equal).mean()),
        positions=rate.size,
        tokens_per_round={length: expected_tokens(mean, length) for length in LENGTHS},
        along_text={length: _along(rate, length) for length in LENGTHS if rate.shape[1] >= length},
        target_perplexity=float(perplexities[0]),
        draft_perplexity=float(perplexities[1]),
    )


def _along(rates: np.ndarray, length: int) -> float:
    """The mean over starts in rows [count, n] of 1 + a_i + a_i a_(i+1) + ..., `length` products."""
    windows = np.lib.stride_tricks.sliding_window_view(rates, length, axis=1)
    return float(1 + np.cumprod(windows, axis=-1).sum(-1).mean())


@jax.jit
def _overlap(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of logits [..., vocabulary]: what p and q share, and whether their best tokens are the same, [...]."""
    shared = jnp.minimum(jax.nn.softmax(p, axis=-1), jax.nn.softmax(q, axis=-1)).sum(-1)
    return shared, p.argmax(-1) == q.argmax(-1)


# The teacher's probabilities


def _digest(sequences: np.ndarray) -> str:
    return hashlib.sha256(sequences.tobytes()).hexdigest()


def _teacher(decoder: Decoder, sequences: np.ndarray, config: AlignConfig, kept: Kept, progress: Progress) -> Any:
    if config.top_k is None or config.top_k >= decoder.config.vocabulary:
        return _WholeTeacher(decoder, sequences)
    return _TopTeacher(decoder, sequences, config.top_k, kept)


class _WholeTeacher:
    """All probabilities, computed when a step needs them: they would fill a disk."""

    def __init__(self, decoder: Decoder, sequences: np.ndarray):
        self._reader, self._sequences = Reader(decoder), sequences
        self._softmax = jax.jit(partial(jax.nn.softmax, axis=-1))

    def prepare(self, progress: Progress) -> float:
        return 0.0

    def of(self, rows: np.ndarray) -> Teacher:
        return Teacher(None, self._softmax(self._reader(self._sequences[rows])))


class _TopTeacher:
    """The k best tokens of each position and their probabilities, a file for some sequences, kept on disk."""

    def __init__(self, decoder: Decoder, sequences: np.ndarray, k: int, kept: Kept):
        self._reader, self._sequences, self._k = Reader(decoder), sequences, k
        self._kept = kept
        self._chunks: list[Teacher] = []

    def prepare(self, progress: Progress) -> float:
        """Compute what is not on disk; the seconds that all of it took, in whatever run."""
        self._kept.path.mkdir(parents=True, exist_ok=True)
        seconds = 0.0
        for at in progress(range(0, len(self._sequences), _CHUNK), "asking the teacher", f"{_CHUNK} sequences"):
            path, sequences = self._kept.path / f"{at // _CHUNK}.safetensors", self._sequences[at : at + _CHUNK]
            found = self._load(path, sequences)
            if found is None:
                self._make(path, sequences)
                found = self._load(path, sequences)
                assert found is not None
            self._chunks.append(found[0])
            seconds += found[1]
        return seconds

    def of(self, rows: np.ndarray) -> Teacher:
        parts = [self._chunks[row // _CHUNK] for row in rows]
        ids, probabilities = ([part[i][row % _CHUNK] for part, row in zip(parts, rows, strict=True)] for i in range(2))
        return Teacher(np.stack(ids), np.stack(probabilities))

    def _make(self, path: Path, sequences: np.ndarray) -> None:
        begun = time.monotonic()
        ids, probabilities = (np.concatenate(parts) for parts in zip(*(self._best(row[None]) for row in sequences), strict=True))
        part = path.with_suffix(f".{os.getpid()}.part")
        part.touch(mode=0o600)  # for the owner alone, as the model is
        facts = json.dumps({"of": self._of(sequences), "seconds": time.monotonic() - begun})
        save_file({"ids": ids, "probabilities": probabilities}, part, {"teacher": facts})
        part.replace(path)

    def _best(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids and probabilities [1, n, k] after each token of [1, n]."""
        p = np.asarray(jax.nn.softmax(self._reader(tokens), axis=-1))
        ids = np.argpartition(p, -self._k, axis=-1)[..., -self._k :]
        return ids.astype(np.int32), np.take_along_axis(p, ids, axis=-1)

    def _of(self, sequences: np.ndarray) -> list[str]:
        """What a file is of: more steps or another draft change nothing."""
        return [self._kept.label, _digest(sequences)]

    def _load(self, path: Path, sequences: np.ndarray) -> tuple[Teacher, float] | None:
        try:
            with safe_open(path, "numpy") as file:
                facts = json.loads(file.metadata()["teacher"])
                if facts["of"] != self._of(sequences):
                    return None
                return Teacher(file.get_tensor("ids"), file.get_tensor("probabilities")), float(facts["seconds"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None
