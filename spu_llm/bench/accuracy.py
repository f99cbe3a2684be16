"""How often the plugin's next token is plaintext's, over real text that it was not calibrated on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation import AssistedDecoder
from ..models import Checkpoint, PlainDecoder
from ..models.calibration_file import calibration_for
from ..models.source import ModelConfig
from ..models.tokenizer import need_tokenizer
from ..progress import Progress
from ..runtime import ProtocolConfig, Session

_PASS = 8  # tokens of one secure pass


def bench_accuracy(model: ModelConfig, checkpoint: Checkpoint, text: str, positions: int, progress: Progress) -> dict[str, Any]:
    """Run passages (lines) of text, each after the model's prefix, until `positions` next tokens were compared.

    Raises UserError where the text is too short.
    """
    tokenizer = need_tokenizer(checkpoint.tokenizer, model)
    passages = [tokenizer.encode(line) for line in text.splitlines() if line.strip()]
    usable = sum(len(ids) // _PASS * _PASS for ids in passages)
    if usable < positions:
        raise UserError(f"the text has {usable} tokens in whole passes, fewer than {positions} positions; give a longer one")
    calibration, ranges = calibration_for(model, checkpoint, progress)
    capacity = len(model.prefix) + max(map(len, passages)) + _PASS
    secure_rows, plain_rows = [], []
    with Session(ProtocolConfig()) as session:
        secure = AssistedDecoder(session, checkpoint.decoder, calibration, capacity, model.prefix, ranges)
        secure.set_up(_PASS, progress)
        parts = list(islice(_parts(passages), -(-positions // _PASS)))
        for first, tokens in progress(parts, "comparing", f"{_PASS} tokens"):
            if first:
                secure.roll_back(len(model.prefix))
                plain = PlainDecoder(checkpoint.decoder, capacity)
                plain.advance(model.prefix)
            secure_rows.append(secure.advance(tokens, last_only=False))
            plain_rows.append(plain.advance(tokens))
    found, want = (np.concatenate(rows)[:positions] for rows in (secure_rows, plain_rows))
    equal = found.argmax(-1) == want.argmax(-1)
    lead = np.sort(want, -1)
    return {
        "positions": positions,
        "top1_agreement": float(equal.mean()),
        "leads_where_not": [float(value) for value in (lead[:, -1] - lead[:, -2])[~equal]],
        "max_logit_error": float(np.abs(found - want).max()),
        "mean_logit_error": float(np.abs(found - want).mean()),
        "max_logit": float(np.abs(want).max()),
    }


def _parts(passages: list[list[int]]) -> Iterable[tuple[bool, list[int]]]:
    """Whole passes of each passage: whether a passage begins, and its tokens."""
    for ids in passages:
        for start in range(0, len(ids) - _PASS + 1, _PASS):
            yield start == 0, ids[start : start + _PASS]
