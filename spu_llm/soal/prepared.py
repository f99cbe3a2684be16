"""The prepared file: everything that the owner's offline step found out about a model, in one safetensors file.

Facts are JSON in the file's metadata, arrays are tensors. **The file is the owner's secret, as the model is**: references and
prefix rows are made of weights. It is written so that its owner alone can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache
from ..models.calibration import Calibration, LayerRanges, Reference
from ..models.owner_file import OwnerFile
from ..models.plan_check import RangeReport
from .maxima import MaximaReport
from .prefix import Trial

VERSION = 1
_FILE = OwnerFile("spu_llm soal", "a prepared file", VERSION, "make it with `spu-llm prepare soal`")


@dataclass(frozen=True)
class SpecialReport:
    """The search for a prefix: eta, all prefixes tried, and M (norms, activations) of the chosen one's tokens in their places.

    before, after: for each position of the text's passages the largest M over passages, with no prefix and the chosen one.
    """

    eta: float
    trials: tuple[Trial, ...]
    chosen: Trial
    prefix_maxima: tuple[tuple[float, float], ...]
    before: tuple[tuple[float, float], ...]
    after: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Facts:
    """What the file says in JSON. checkpoint, text: SHA-256 of the model's files and of the calibration text.

    layers: ranges under the chosen reference, over text and every token right after the prefix; tokens: of the text. seconds,
    cpu_seconds: of the last run, and what all of its threads worked, which other programs on the machine hardly change.
    """

    model: str
    checkpoint: str
    text: str
    prefix: tuple[int, ...]
    prefix_text: str
    layers: tuple[LayerRanges, ...]
    final_squares: tuple[float, float]
    tokens: int
    ranges: RangeReport
    special: SpecialReport
    maxima: MaximaReport
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Prepared:
    """A model made ready. prefix_rows: each layer's keys and values [prefix, kv_heads, head_width] of the prefix.

    references: the learned ones, whichever reference was chosen; `calibration` and `ranges` are for the chosen one.
    """

    facts: Facts
    references: tuple[np.ndarray, ...]
    prefix_rows: tuple[LayerCache, ...]

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.facts.prefix

    @property
    def calibration(self) -> Calibration:
        facts = self.facts
        return Calibration(facts.layers, self.references, facts.final_squares, facts.tokens, self.reference)

    @property
    def ranges(self) -> RangeReport:
        return self.facts.ranges

    @property
    def reference(self) -> Reference:
        """What stands for softmax's maximum."""
        return self.facts.maxima.choice.reference

    @property
    def phi(self) -> np.ndarray:
        """[layers, 2] factors of the two norms' inputs that bring the geometric middle of their mean squares to 1."""
        return np.array([[scaling(layer.attention_squares), scaling(layer.ffn_squares)] for layer in self.facts.layers])

    @property
    def final_phi(self) -> float:
        return scaling(self.facts.final_squares)


def scaling(squares: tuple[float, float]) -> float:
    """phi such that phi^2 times mean squares from least to largest has its geometric middle at 1."""
    return float((squares[0] * squares[1]) ** -0.25)


def save_prepared(prepared: Prepared, path: Path) -> None:
    """Write the file whole or not at all, for its owner alone. Raises UserError where it cannot be written."""
    _FILE.write(path, prepared.facts, _tensors(prepared))


def load_prepared(path: Path, checkpoint: str) -> Prepared:
    """The file of the model whose `content_digest` is given. Raises UserError for a file that is not that."""
    facts, tensors = _FILE.read(path, Facts)
    if facts.checkpoint != checkpoint:
        raise UserError(
            f"{path}: was prepared for model {facts.model} with other weights or tokenizer; name this model's own file, or "
            f"{_FILE.remedy}"
        )
    references = tuple(tensors[f"reference.{i}"] for i in range(len(facts.layers)))
    rows = [[tensors[f"prefix.{i}.{part}"] for part in LayerCache._fields] for i in range(len(facts.layers))]
    return Prepared(facts, references, tuple(LayerCache(*pair) for pair in rows))


def read_prefix(path: Path) -> tuple[int, ...]:
    """The prefix that a file gives, before its model is at hand. Raises UserError for what is no prepared file."""
    return _FILE.read_facts(path, Facts).prefix


def _tensors(prepared: Prepared) -> dict[str, np.ndarray]:
    found = {f"reference.{i}": value for i, value in enumerate(prepared.references)}
    for i, rows in enumerate(prepared.prefix_rows):
        found |= {f"prefix.{i}.{part}": np.ascontiguousarray(value) for part, value in rows._asdict().items()}
    return found
