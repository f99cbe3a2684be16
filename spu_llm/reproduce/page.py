"""results/index.html: every table, plot and picture of the experiments on one page that needs nothing from outside itself."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..errors import UserError
from ..pictures import DRAW
from ..pictures.page import STYLE
from . import manifest, record
from .figures import Results, Row, Table, Value
from .manifest import Size, Study
from .record import MADE, Record
from .run import Runs

_TEMPLATE = Path(__file__).with_name("page.html")
_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Source:
    """A folder of results and what is known of how they were made.

    label: what they are called on the page; dirty: made with sources that are in no commit; stale: sources have changed since.
    """

    label: str
    results: Results
    command: str
    when: str | None
    commit: str | None
    machine: str | None = None
    seconds: float | None = None
    dirty: bool = False
    stale: bool = False


@dataclass(frozen=True)
class Shown:
    """A table as one source has it. main: the first source that has any of it; the others are folded away."""

    source: Source
    table: Table
    main: bool


@dataclass(frozen=True)
class Image:
    """A plot or picture. content: a data URI, or the SVG itself. fixed: made for a light page, and turned around on a dark one."""

    title: str
    content: str | Markup
    source: Source
    fixed: bool = False


@dataclass(frozen=True)
class Section:
    """An experiment on the page. absent: what is not there yet; problems: what is wrong; failure: why a run ended badly."""

    study: Study
    sources: tuple[Source, ...]
    tables: tuple[tuple[Shown, ...], ...]
    images: tuple[Image, ...]
    absent: tuple[str, ...]
    problems: tuple[str, ...]
    failure: str | None

    @property
    def origin(self) -> str:
        """What the results are called that stand for the experiment."""
        return next((shown[0].source.label for shown in self.tables if shown), "")

    @property
    def first(self) -> tuple[Table, Row] | None:
        """The row that stands for the experiment: the first that is held against a baseline, of the first table that is there."""
        table = next((shown[0].table for shown in self.tables if shown), None)
        if table is None:
            return None
        compared = (row for row in table.rows if row.baselines and row.baselines[0].times is not None)
        return table, next(compared, table.rows[0])


@dataclass(frozen=True)
class Page:
    html: str
    problems: tuple[str, ...]


def render_page(studies: Sequence[Study], out: Path, size: Size, failures: Mapping[str, str] | None = None) -> Page:
    """The page from what is there: quick runs and committed results, or at full size the latter alone.

    Whatever is missing or wrong is said in its place; what is wrong is returned too.
    """
    sections = [_section(study, _sources(study, studies, out, size), (failures or {}).get(study.name)) for study in studies]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"figure": figure, "times": times, "duration": _duration, "arrows": _arrows}
    html = environment.from_string(_TEMPLATE.read_text()).render(
        systems=[(system, list(found)) for system, found in groupby(sections, lambda section: section.study.about.system)],
        style=Markup(STYLE),
        machine=record.machine(),
        commit=record.commit(),
        dirty=record.changed(studies),
        date=record.now(),
        size=size,
        failed=[section.study.name for section in sections if section.failure],
    )
    return Page(html, tuple(problem for section in sections for problem in section.problems))


def check_study(study: Study) -> None:
    """Resolve all that an experiment shows from its committed results. Raises UserError at what is missing or wrong."""
    results = Results(study, study.folder)
    Record.load(study.folder / MADE)
    for file in study.about.files:
        if not (study.folder / file).is_file():
            raise UserError(f"{study.manifest}: {file} is not there; run `spu-llm reproduce {study.name} --full`")
    results.tables()
    for picture in study.about.pictures:
        _drawn(picture, results)


def figure(value: Value) -> str:
    """A value for people: three significant digits, all digits before the point, thousands apart."""
    if value is None:
        return "not run"
    if isinstance(value, str):
        return value
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    whole = value == int(value) or abs(value) >= 99.95
    return f"{value:,.0f}" if whole else f"{value:#.3g}"


def times(ratio: float) -> str:
    """How many times as good, such as 4.7x."""
    if ratio >= 10:
        return f"{ratio:,.0f}x"
    return f"{ratio:.1f}x" if ratio >= 0.995 else f"{ratio:#.2g}x"


def _sources(study: Study, studies: Sequence[Study], out: Path, size: Size) -> list[Source]:
    """Where results come from: what was run here first."""
    committed = _committed(study, Runs(out, "full").record(study))
    runs = Runs(out, "quick")
    made = runs.record(study) if size == "quick" else None
    if made is None:
        return [committed]
    quick = _source("quick, run here", Results(study, runs.folder(study), whole=False), made)
    return [replace(quick, stale=not runs.finished(study, studies)), committed]


def _committed(study: Study, run: Record | None) -> Source:
    results = Results(study, study.folder)
    made = Record.load(study.folder / MADE)
    if made is not None:
        here = run is not None and run.date == made.date
        return _source("full, run here" if here else "committed result", results, made)
    command = study.about.run("full")
    last = record.last_commit([study.folder / file for file in study.about.files])
    return Source("committed result", results, command.command if command else "", last and last[1], last and last[0])


def _source(label: str, results: Results, made: Record) -> Source:
    return Source(label, results, made.command, made.date, made.commit, made.machine, made.seconds, made.dirty)


def _section(study: Study, sources: Sequence[Source], failure: str | None) -> Section:
    problems: dict[str, None] = {}
    absent: list[str] = []
    tables, images = [], []
    for spec in study.about.tables:
        shown = list(_shown(spec, sources, problems))
        tables.append(tuple(Shown(source, table, i == 0) for i, (source, table) in enumerate(shown)))
        if not shown:
            absent.append(f"table “{spec.title}”")
    for plot in study.about.plots:
        found = next((source for source in sources if (source.results.folder / plot).is_file()), None)
        if found is None:
            absent.append(f"plot {plot}")
        else:
            images.append(_plot(study, plot, found))
    for picture in study.about.pictures:
        drawn = next(_pictures(picture, sources, problems), None)
        if drawn is None:
            absent.append(f"picture “{picture.title}”")
        else:
            images.append(drawn)
    return Section(study, tuple(sources), tuple(tables), tuple(images), tuple(absent), tuple(problems), failure)


def _shown(spec: manifest.Table, sources: Sequence[Source], problems: dict[str, None]) -> Iterator[tuple[Source, Table]]:
    """The table of each source that has any of it."""
    for source in sources:
        try:
            table = source.results.table(spec)
        except UserError as error:
            problems[str(error)] = None
        else:
            if table.rows:
                yield source, table


def _plot(study: Study, file: str, source: Source) -> Image:
    path = source.results.folder / file
    content = path.read_bytes()
    kind = _TYPES.get(path.suffix, "application/octet-stream")
    title = f"{study.about.title}: {path.stem.replace('_', ' ')}"
    fixed = path.suffix != ".svg" or b"prefers-color-scheme" not in content
    return Image(title, f"data:{kind};base64,{base64.b64encode(content).decode()}", source, fixed)


def _pictures(picture: manifest.Picture, sources: Sequence[Source], problems: dict[str, None]) -> Iterator[Image]:
    for source in sources:
        try:
            drawn = _drawn(picture, source.results)
        except UserError as error:
            problems[str(error)] = None
        else:
            if drawn is not None:
                yield Image(picture.title, drawn, source)


def _drawn(picture: manifest.Picture, results: Results) -> Markup | None:
    """An SVG, or None where there is nothing to draw. Raises UserError where the data are of another kind."""
    data: Any = results.picture(picture)
    if data is None:
        return None
    try:
        return Markup(DRAW[picture.kind](data))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        place = f"{results.study.manifest}, picture {picture.title!r}"
        raise UserError(f"{place}: no {picture.kind} can be drawn of it ({type(error).__name__}: {error}); correct `at`") from None


def _arrows(text: str) -> str:
    return text.replace("->", "→")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
