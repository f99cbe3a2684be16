"""What the owner's PYU holds: a checkpoint, what was measured on its calibration text, and the public prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.experimental import disable_x64

from ..experiment import schema
from ..models import load_checkpoint
from ..models.cache import LayerCache
from ..models.calibration import Calibration
from ..models.calibration_file import calibration_for
from ..models.decoder import Decoder
from ..models.published import Published
from ..models.source import content_digest
from ..models.tokenizer import Tokenizer
from ..soal.prepared import load_prepared


@dataclass(frozen=True)
class OwnerModel:
    """The owner's secret, but for the prefix and for the tokenizer, which it may give to the client."""

    decoder: Decoder
    calibration: Calibration
    prefix: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    prefix_rows: Sequence[LayerCache] | None = None


@dataclass(frozen=True)
class PublicFacts:
    """What the owner tells client and dealer (docs/leakage.md): what it publishes, and how many cache rows it was asked for."""

    model: Published
    capacity: int


def load_model(name: str, soal: str | None = None) -> OwnerModel:
    """A model by the name or path of its config, with its calibration, or what a file of `spu-llm prepare soal` says instead.

    To be run on the owner's PYU. Calibrates now where that was not done before. Raises UserError for what cannot be read.
    """
    with disable_x64():  # plaintext is computed in single precision, whatever the inputs of an SPU need
        model = schema.load_model(name)
        checkpoint = load_checkpoint(model.locate())
        if soal is None:
            calibration, _ = calibration_for(model, checkpoint)
            return OwnerModel(checkpoint.decoder, calibration, model.prefix, checkpoint.tokenizer)
        prepared = load_prepared(Path(soal), content_digest(model.locate()))
        return OwnerModel(
            checkpoint.decoder, prepared.calibration, prepared.facts.prefix, checkpoint.tokenizer, prepared.prefix_rows
        )
