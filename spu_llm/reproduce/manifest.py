"""What experiments/NAME/about.yaml says of an experiment: commands that make its results, and which figures of these are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, get_args

import jmespath
import yaml
from jmespath.exceptions import JMESPathError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError
from ..experiment.schema import CONFIGS
from ..pictures import DRAW

System = Literal["Main figure", "Stock SPU", "Plugin", "SOAL", "Comet", "POST", "AR-HE", "Peers", "Systems"]
SYSTEMS: tuple[str, ...] = get_args(System)
"""In the order of the page."""
Size = Literal["quick", "full"]

EXPERIMENTS = CONFIGS.parent / "experiments"
"""The experiments of the checkout that the package is installed from."""
ABOUT = "about.yaml"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML has it


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("name a file inside the results folder")
    return name


def _compiles(path: str) -> str:
    try:
        jmespath.compile(path)
    except JMESPathError as error:
        raise ValueError(f"is no JMESPath ({str(error).splitlines()[0]})") from None
    return path


def _drawn(kind: str) -> str:
    if kind not in DRAW:
        raise ValueError(f"is no kind of picture; known: {', '.join(DRAW)}")
    return kind


_File = Annotated[str, AfterValidator(_inside)]
_Path = Annotated[str, AfterValidator(_compiles)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(_Part):
    """A shell command, run in the repository's root by `sh -eu`, and about how many minutes it takes on two cores.

    It finds $OUT, an existing folder for what it writes and keeps, and $PYTHON, whose folder is the first of $PATH.
    """

    command: str = Field(min_length=1)
    minutes: float = Field(gt=0)


class Rows(_Part):
    """One row of a table, or one for each item that `each` finds in the file.

    what: with {keys} of the item. ours, baselines: JMESPath over the item, to a number, a text, or null where nothing was run.
    scale: what numbers are multiplied by to be in `unit`. paper: the value that the paper gives, as text.
    """

    what: str
    file: _File = "result.json"
    each: _Path | None = None
    ours: _Path
    baselines: list[_Path] = []
    unit: str = ""
    scale: float = 1
    better: Literal["lower", "higher", "neither"] = "lower"
    paper: str | None = None


class Table(_Part):
    """ours, baselines: names of the columns."""

    title: str
    ours: str
    baselines: list[str]
    note: str | None = None
    rows: list[Rows] = Field(min_length=1)

    @model_validator(mode="after")
    def _as_many(self) -> Table:
        for row in self.rows:
            if len(row.baselines) != len(self.baselines):
                counts = f"{len(row.baselines)} baselines, {self.title!r} {len(self.baselines)}"
                raise ValueError(f"{row.what!r} has {counts}; give one path a baseline")
        return self


class Picture(_Part):
    """What is drawn from results when the page is made. at: JMESPath of what is drawn."""

    kind: Annotated[str, AfterValidator(_drawn)]
    title: str
    file: _File = "result.json"
    at: _Path = "@"


class About(_Part):
    """An experiment. quick: its part of the quick set; full: what makes the committed results, left out where quick does.

    needs: experiments whose full runs come before its own.
    """

    title: str
    system: System
    quick: Run | None = None
    full: Run | None = None
    needs: list[str] = []
    paper: str | None = None
    differs: str | None = None
    tables: list[Table] = []
    plots: list[_File] = []
    pictures: list[Picture] = []

    @model_validator(mode="after")
    def _complete(self) -> About:
        if self.quick is None and self.full is None:
            raise ValueError("has no command; give quick, full or both")
        if self.paper and not self.differs:
            raise ValueError("names a paper's figures but not what differs from its setting; add `differs`")
        return self

    def run(self, size: Size) -> Run | None:
        """What is run at a size; the quick command makes full results too where there is no other."""
        return self.quick if size == "quick" else self.full or self.quick

    @property
    def files(self) -> list[str]:
        """The results that are shown, once each."""
        rows = [row.file for table in self.tables for row in table.rows]
        return list(dict.fromkeys([*rows, *(picture.file for picture in self.pictures), *self.plots]))


@dataclass(frozen=True)
class Study:
    """An experiment in its folder, which has the committed results too."""

    folder: Path
    about: About

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def manifest(self) -> str:
        """For messages, which the page shows too: without the place of the checkout."""
        return "/".join((*self.folder.parts[-2:], ABOUT))


def load_study(folder: Path) -> Study:
    """An experiment by its folder. Raises UserError, in one line, where its manifest is not as it should be."""
    path = folder / ABOUT
    try:
        settings = yaml.load(path.read_text(), _LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({str(error).splitlines()[0]}); mend it") from None
    try:
        return Study(folder, About.model_validate(settings))
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}") from None


def load_studies(folder: Path | None = None) -> list[Study]:
    """All experiments of a folder, by default the checkout's, that have a manifest; in the order of the page."""
    folder = folder or EXPERIMENTS
    found = [load_study(path.parent) for path in sorted(folder.glob(f"*/{ABOUT}"))]
    if not found:
        raise UserError(f"{folder}: no experiments there; install spu_llm from a checkout of its repository (make setup)")
    names = {study.name for study in found}
    for study in found:
        for need in study.about.needs:
            if need not in names:
                raise UserError(f"{study.manifest}: needs {need}, which is no experiment; known: {', '.join(sorted(names))}")
    return sorted(found, key=lambda study: (SYSTEMS.index(study.about.system), study.name))


def choose(studies: Sequence[Study], names: Iterable[str]) -> list[Study]:
    """The experiments that are meant by names of folders or of systems, in any case; all of them by no name.

    Where a system has an experiment of its own name, the folder's path means that one alone. Raises UserError at an unknown name.
    """
    names = list(names)
    wanted: set[str] = set()
    for name in names:
        found = {study.name for study in studies if _means(name, study)}
        if not found:
            known = ", ".join([*SYSTEMS, *(study.name for study in studies)])
            raise UserError(f"{name}: neither an experiment nor a system; known: {known}")
        wanted |= found
    return [study for study in studies if study.name in wanted or not names]


def with_needs(studies: Sequence[Study], chosen: Sequence[Study]) -> list[Study]:
    """The chosen experiments, each after those that it needs. Raises UserError where some need each other."""
    by_name = {study.name: study for study in studies}
    ordered: dict[str, Study] = {}

    def add(study: Study, above: tuple[str, ...]) -> None:
        if study.name in above:
            raise UserError(f"{study.manifest}: {' needs '.join([*above, study.name])}; take one of these needs away")
        for need in study.about.needs:
            add(by_name[need], (*above, study.name))
        ordered.setdefault(study.name, study)

    for study in chosen:
        add(study, ())
    return list(ordered.values())


def _means(name: str, study: Study) -> bool:
    if "/" in name:
        return Path(name).resolve() == study.folder.resolve()
    system = study.about.system
    return name == study.name or _plain(name) in (_plain(study.name), _plain(system), _plain(system.split()[0]))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key {where}; take it out, or see experiments/README.md for what there may be"
        case "missing":
            return f"{where} is missing; add it"
    reason = first["msg"].removeprefix("Value error, ")
    given = f" is {first['input']!r}" if isinstance(first["input"], (str, int, float)) else ""
    return " ".join(f"{where}{given}: {reason}".removeprefix(": ").split())
