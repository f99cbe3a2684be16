"""What made a result: the command, the sources, the machine, the day."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UserError
from ..experiment.files import write_whole
from ..experiment.schema import CONFIGS
from .manifest import ABOUT, Size, Study

ROOT = CONFIGS.parent
"""Of the repository; commands run here."""
MADE = "made.json"

_PACKAGE = Path(__file__).resolve().parents[1]
_SHOWING = ("reproduce/", "pictures/", "cli/reproduce.py")  # make no figures
_SCRIPTS = {".py", ".sh", ".yaml", ".txt", ".jsonl"}  # of an experiment; the rest are results


class Record(BaseModel):
    """One finished run. commit, dirty: of the sources, and whether they were changed since; digest: of what decides the results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    commit: str | None
    machine: str
    date: str
    seconds: float | None
    size: Size = "full"
    dirty: bool = False
    digest: str | None = None

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """None where there is no file. Raises UserError where there is another one."""
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ValidationError):
            raise UserError(f"{path}: is no record of a run; remove it and run `spu-llm reproduce` again") from None

    def write(self, path: Path, digest: bool = True) -> None:
        """The record as JSON; the digest serves its own machine only."""
        write_whole(path, self.model_dump_json(indent=1, exclude=None if digest else {"digest"}) + "\n")


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def sources_digest(study: Study, needed: Iterable[Study], command: str) -> str:
    """Hash of what decides an experiment's results: command, package, configurations, scripts of it and of what it needs."""
    versions = f"{platform.python_version()} {_version('spu')} {_version('jax')}"
    found = hashlib.sha256(f"{command}\0{versions}".encode() + _package_digest())
    for path in sorted(_scripts([study, *needed])):
        _add(found, path, ROOT)
    return found.hexdigest()


def commit() -> str | None:
    """The commit that is checked out; None where git or the repository is not there."""
    return _git("rev-parse", "--short=12", "HEAD")


def changed(studies: Iterable[Study]) -> bool:
    """Whether sources differ from the commit: package, configurations, scripts of these experiments."""
    return bool(_git("status", "--porcelain", "--", str(_PACKAGE), str(CONFIGS), *map(str, _scripts(studies))))


def last_commit(files: Iterable[Path]) -> tuple[str, str] | None:
    """Commit that last changed one of the files, and its day; None where git does not know them."""
    found = _git("log", "-1", "--format=%h %cs", "--", *map(str, files))
    return (found.split()[0], found.split()[1]) if found else None


@lru_cache(maxsize=1)
def machine() -> str:
    """Cores, processor, memory, system and versions, without names of host or user."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{cores} core{'s' * (cores > 1)} of {_processor()}", f"{memory:.0f} GiB", _system()]
    return ", ".join([*parts, f"Python {platform.python_version()}", f"spu {_version('spu')}", f"jax {_version('jax')}"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _scripts(studies: Iterable[Study]) -> list[Path]:
    """Scripts and inputs of experiments, and what lies beside their folders for all of them."""
    folders = {folder for study in studies for folder in (study.folder, study.folder.parent)}
    return [path for folder in folders for path in folder.iterdir() if path.suffix in _SCRIPTS and path.name != ABOUT]


@lru_cache(maxsize=1)
def _package_digest() -> bytes:
    found = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".json")):  # coefficients are JSON
        if not path.relative_to(_PACKAGE).as_posix().startswith(_SHOWING):
            _add(found, path, _PACKAGE)
    for path in sorted(path for path in CONFIGS.rglob("*") if path.is_file()):
        _add(found, path, CONFIGS)
    return found.digest()


def _add(found: hashlib._Hash, path: Path, root: Path) -> None:
    name = path.relative_to(root) if path.is_relative_to(root) else path.name
    content = path.read_bytes()
    found.update(f"\0{name}\0{len(content)}\0".encode() + content)


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ended.stdout.strip()
