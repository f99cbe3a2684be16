"""Tables of plain rows, resolved from results by the paths of a manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from ..errors import UserError
from . import manifest
from .manifest import Study

Value = float | int | str | None
"""A figure, what is said instead of one, or None: not run."""


@dataclass(frozen=True)
class Baseline:
    """A baseline's value, and how many times as good ours is: above 1 where ours is the better."""

    value: Value
    times: float | None


@dataclass(frozen=True)
class Row:
    what: str
    unit: str
    ours: Value
    baselines: tuple[Baseline, ...]
    paper: str | None


@dataclass(frozen=True)
class Table:
    """missing: results that were not there."""

    title: str
    ours: str
    baselines: tuple[str, ...]
    note: str | None
    rows: tuple[Row, ...]
    missing: tuple[str, ...]

    @property
    def compared(self) -> list[bool]:
        """Of each baseline, whether any row says how many times as good ours is."""
        return [any(row.baselines[i].times is not None for row in self.rows) for i in range(len(self.baselines))]


@dataclass(frozen=True)
class Results:
    """A folder of an experiment's results. whole: every path of the manifest must find something; quick results may be fewer."""

    study: Study
    folder: Path
    whole: bool = True
    _loaded: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def tables(self) -> list[Table]:
        """All tables. Raises UserError where a path is wrong or a file is not JSON."""
        return [self.table(table) for table in self.study.about.tables]

    def table(self, table: manifest.Table) -> Table:
        """One table; a file that is not there gives no rows. Raises UserError where a path is wrong or a file is not JSON."""
        rows: list[Row] = []
        missing: dict[str, None] = {}
        for spec in table.rows:
            data = self.load(spec.file)
            if data is _NOTHING:
                missing[spec.file] = None
            else:
                rows += self._rows(spec, data, f"{self.study.manifest}, table {table.title!r}")
        return Table(table.title, table.ours, tuple(table.baselines), table.note, tuple(rows), tuple(missing))

    def picture(self, picture: manifest.Picture) -> Any:
        """What a picture is drawn from; None where it is not there. Raises UserError where its path in whole results is wrong."""
        data = self.load(picture.file)
        if data is _NOTHING:
            return None
        place = f"{self.study.manifest}, picture {picture.title!r}"
        found = _find(picture.at, data, place)
        if found in (_NOTHING, None) and not self.whole:
            return None
        if found is _NOTHING or found is None:
            raise UserError(f"{place}: {picture.at} finds nothing in {self._named(picture.file)}; correct the path")
        return found

    def load(self, file: str) -> Any:
        """A file's content, or a mark that there is none."""
        path = self.folder / file
        try:
            if file not in self._loaded:
                self._loaded[file] = json.loads(path.read_text())
            return self._loaded[file]
        except FileNotFoundError:
            return _NOTHING
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{self._named(file)}: cannot be read ({reason}); run `spu-llm reproduce {self.study.name}`") from None

    def _named(self, file: str) -> str:
        return "/".join((*self.folder.parts[-2:], file))

    def _rows(self, spec: manifest.Rows, data: Any, place: str) -> list[Row]:
        items = self._items(spec, data, place)
        columns = [self._column(path, items, spec, place) for path in (spec.ours, *spec.baselines)]
        found = []
        for item, ours, *others in zip(items, *columns, strict=True):
            if ours is None and not self.whole:
                continue
            baselines = tuple(Baseline(other, _times(ours, other, spec.better)) for other in others)
            found.append(Row(_filled(spec.what, item, place), spec.unit, ours, baselines, spec.paper))
        return found

    def _items(self, spec: manifest.Rows, data: Any, place: str) -> Sequence[Any]:
        if spec.each is None:
            return [data]
        found = _find(spec.each, data, place)
        if isinstance(found, list) and (found or not self.whole):
            return found
        if found in (_NOTHING, None) and not self.whole:
            return []
        raise UserError(f"{place}: {spec.each} finds no list of items in {self._named(spec.file)}; correct the path")

    def _column(self, path: str, items: Sequence[Any], spec: manifest.Rows, place: str) -> list[Value]:
        values = [_find(path, item, place) for item in items]
        if self.whole and all(value is _NOTHING for value in values):
            raise UserError(f"{place}: {path} finds nothing in {self._named(spec.file)}; correct the path")
        wrong = next((value for value in values if isinstance(value, (list, dict))), None)
        if wrong is not None:
            raise UserError(f"{place}: {path} finds {json.dumps(wrong)[:40]}... instead of a number; correct the path")
        return [_scaled(value, spec.scale) for value in values]


class _Nothing:
    """Told from null, which a result says itself."""


_NOTHING = _Nothing()
_NULL = _Nothing()
_FAILS = (JMESPathError, TypeError, LookupError, AttributeError)  # beside its own errors, comparing texts with numbers is one


def _find(path: str, data: Any, place: str) -> Any:
    """What a path finds; null and nothing, which JMESPath does not tell apart, are told apart by marking nulls."""
    try:
        found = jmespath.search(path, data)
    except _FAILS as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{place}: {path} fails ({reason}); correct the path") from None
    if found is not None or path.strip() == "`null`":
        return found
    try:
        return None if jmespath.search(path, _marked(data)) is _NULL else _NOTHING
    except _FAILS:  # functions know no marks
        return _NOTHING


def _marked(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _marked(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_marked(value) for value in data]
    return _NULL if data is None else data


def _scaled(value: Any, scale: float) -> Value:
    if value is _NOTHING or value is None:
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    scaled = value if scale == 1 else value * scale
    return scaled if math.isfinite(scaled) else str(scaled)


def _times(ours: Value, other: Value, better: str) -> float | None:
    if better == "neither" or not isinstance(ours, (int, float)) or not isinstance(other, (int, float)):
        return None
    above, below = (other, ours) if better == "lower" else (ours, other)
    return above / below if above > 0 and below > 0 else None


def _filled(what: str, item: Any, place: str) -> str:
    try:
        return what.format_map(item if isinstance(item, dict) else {})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        keys = ", ".join(item) if isinstance(item, dict) else "none"
        raise UserError(
            f"{place}: {what!r} cannot be filled in ({type(error).__name__}: {error}); keys of the item: {keys}"
        ) from None
