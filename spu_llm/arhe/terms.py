"""What client and server agree on before a key is made, all of it public: shapes, polynomials' degrees, CKKS parameters.

Nothing here depends on a weight or on a calibration text: ranges, and so every polynomial's coefficients, stay with the owner.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..models.config import DecoderConfig
from .files import digest_of, read_facts, write_facts
from .graph import Options, build_program
from .parameters import CkksParameters
from .polynomials import Degrees
from .schedule import Schedule, place

_KIND = "terms of AR-HE, 1"
_REMEDY = "take what `spu-llm arhe publish` wrote"


@dataclass(frozen=True)
class Terms:
    """A model's shape and how its steps are computed. `prefix`: public tokens before every prompt. `secure`: whether the ring must
    give 128 bits by the standard's tables; without it a toy ring is taken. `tokenizer`: the published file's SHA-256."""

    model: str
    config: DecoderConfig
    parameters: CkksParameters
    degrees: Degrees
    options: Options
    prefix: tuple[int, ...] = ()
    secure: bool = False
    tokenizer: str | None = None

    @property
    def digest(self) -> str:
        return digest_of(self.facts())

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def schedule(self) -> Schedule:
        """Every operation and bootstrap of a step."""
        return place(build_program(self.config, self.degrees, self.options, self.parameters.slots), self.parameters)


def read_terms(facts: dict[str, Any], place: Path) -> Terms:
    """The terms whose facts these are. Raises UserError where a part is missing or makes no sense."""
    parts = {"config": DecoderConfig, "parameters": CkksParameters, "degrees": Degrees, "options": Options}
    try:
        made = {name: kind(**_tuples(facts[name])) for name, kind in parts.items()}
        rest = {field.name: facts[field.name] for field in fields(Terms) if field.name not in parts}
        return Terms(**made, **_tuples(rest))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{place}: holds no terms that this version knows ({error}); {_REMEDY}") from None


def publish(folder: Path, terms: Terms) -> None:
    """Write the terms to `terms.json`."""
    write_facts(folder / "terms.json", _KIND, terms.facts())


def load_terms(folder: Path) -> Terms:
    """What `publish` wrote. Raises UserError where it is not there or not whole."""
    path = folder / "terms.json"
    return read_terms(read_facts(path, _KIND, _REMEDY), path)


def _tuples(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists alone."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
