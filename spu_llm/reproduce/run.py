"""Runs experiments one after the other; what is finished and unchanged is not run again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from ..errors import UserError
from ..experiment.files import make_folder
from . import record
from .manifest import Size, Study, with_needs
from .record import MADE, Record

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 10.0  # for processes to remove what they have in memory and on disk
_NEARLY = 0.95  # of an experiment's part of the bar, until it has ended
_STARTED = "started.txt"
_LOG = "log.txt"


@dataclass(frozen=True)
class Runs:
    """Runs of one size under a folder, results/ by default.

    An experiment's $OUT is reproduce/NAME there, and reproduce/NAME.full for a full run, whose scripts must not take quick parts
    for finished ones. A record beside it says that the run ended well and what it was made by.
    """

    out: Path
    size: Size

    def folder(self, study: Study) -> Path:
        return self.out / "reproduce" / (study.name if self.size == "quick" else f"{study.name}.full")

    def record(self, study: Study) -> Record | None:
        return Record.load(self._record(study))

    def digest(self, study: Study, studies: Sequence[Study]) -> str:
        run = study.about.run(self.size)
        needed = [other for other in with_needs(studies, [study]) if other.name != study.name]
        return record.sources_digest(study, needed, run.command if run else "")

    def finished(self, study: Study, studies: Sequence[Study]) -> bool:
        """Whether a run of the present sources ended well."""
        found = self.record(study)
        return found is not None and found.digest == self.digest(study, studies)

    def forget(self, study: Study) -> None:
        """Have the next run begin anew."""
        for file in (self._record(study), self.folder(study) / _STARTED):
            file.unlink(missing_ok=True)

    def begin(self, study: Study, digest: str) -> Path:
        """The folder for a run that starts or goes on; what other sources left there is removed, and so is the record.

        A full run writes over the committed results while it goes on, so their record goes too until it has ended.
        """
        folder = self.folder(study)
        self._record(study).unlink(missing_ok=True)
        if self.size == "full" and study.about.full is not None:
            (study.folder / MADE).unlink(missing_ok=True)
        started = folder / _STARTED
        if folder.exists() and not (started.exists() and started.read_text() == digest):
            shutil.rmtree(folder)
        make_folder(folder)
        if not started.exists():  # its time tells what was written since
            started.write_text(digest)
        return folder

    def end(self, study: Study, made: Record) -> None:
        """Write the record; and beside the committed results, where these were made. Raises _Failed where nothing was written."""
        since = (self.folder(study) / _STARTED).stat().st_mtime
        written = self.folder(study) if self.size == "quick" or study.about.full is None else study.folder
        shown = [path for file in study.about.files if (path := written / file).exists()]
        if not any(path.stat().st_mtime >= since for path in shown):
            raise _Failed(f"wrote none of {', '.join(study.about.files)} to {written}")
        if self.size == "full":
            if study.about.full is None:
                for file in study.about.files:
                    shutil.copy2(self.folder(study) / file, study.folder / file)
            made.write(study.folder / MADE, digest=False)
        made.write(self._record(study))

    def _record(self, study: Study) -> Path:
        return self.out / "reproduce" / f"{study.name}.{self.size}.json"


def reproduce(
    chosen: Sequence[Study], studies: Sequence[Study], runs: Runs, again: bool = False, quiet: bool = False
) -> dict[str, str]:
    """Run the chosen of all experiments, at a full size those first that they need; what is finished only `again`.

    An experiment that fails is reported and the others are run, save those that need it. Returns why, by name. Raises
    KeyboardInterrupt, when the running experiment's processes have ended.
    """
    if again:
        for study in chosen:
            runs.forget(study)
    ordered = with_needs(studies, chosen) if runs.size == "full" else list(chosen)
    due = [study for study in ordered if study.about.run(runs.size) and not runs.finished(study, studies)]
    failed: dict[str, str] = {}
    # CI ends a job by SIGTERM, a closed terminal by SIGHUP; the command's processes are in a group of their own and would not hear
    ended = _handled_by(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)
    with _Gauge({study.name: _minutes(study, runs) for study in due}, quiet) as gauge, ended:
        for study in due:
            gauge.at(study.name, 0)
            broken = [need for need in study.about.needs if need in failed] if runs.size == "full" else []
            try:
                if broken:
                    raise _Failed(f"needs {broken[0]}, which failed")
                _run(study, runs, runs.digest(study, studies), gauge)
            except (_Failed, UserError, OSError) as error:
                failed[study.name] = str(error)
                gauge.say(f"{study.name}: {error}")
            gauge.done(study.name)
    return failed


class _Failed(Exception):
    pass


def _minutes(study: Study, runs: Runs) -> float:
    run = study.about.run(runs.size)
    return run.minutes if run else 0


def _run(study: Study, runs: Runs, digest: str, gauge: _Gauge) -> None:
    """Run an experiment's command to its end. Raises _Failed with its last line and the log's path."""
    run = study.about.run(runs.size)
    assert run is not None
    folder = runs.begin(study, digest)
    log = folder / _LOG
    commit, dirty, start = record.commit(), record.changed([study]), time.monotonic()
    with log.open("w") as file, _Child(run.command, folder, file.fileno()) as child:
        while (code := child.wait(_POLL_SECONDS)) is None:
            gauge.at(study.name, (time.monotonic() - start) / 60)
    if code:
        raise _Failed(f"exit {code}: {_last_line(log)} (all of it: {log})")
    seconds = round(time.monotonic() - start, 1)
    made = Record(
        command=run.command, commit=commit, machine=record.machine(), date=record.now(), seconds=seconds, size=runs.size,
        dirty=dirty, digest=digest,
    )  # fmt: skip
    runs.end(study, made)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


class _Child:
    """A shell command with all that it starts, which ends with it."""

    def __init__(self, command: str, out: Path, log: int):
        folder = str(Path(sys.executable).parent)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, "OUT": str(out.resolve()), "PYTHON": sys.executable, "PATH": path}
        self._process = subprocess.Popen(
            ["sh", "-eu", "-c", command], cwd=record.ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> _Child:
        return self

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None while it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        with _handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not leave the command behind
            self._signal(signal.SIGTERM)
            until = time.monotonic() + _GRACE_SECONDS
            while self._signal(0) and time.monotonic() < until:
                self._process.poll()
                time.sleep(0.02)
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> bool:
        """Whether any process of the group was left to signal."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False


@contextmanager
def _handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Have signals handled so, within."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _Gauge:
    """One bar over all experiments, by the minutes that each takes about."""

    def __init__(self, minutes: dict[str, float], quiet: bool):
        self._minutes, self._past = minutes, 0.0
        shape = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} of about {total_time}"
        total = sum(minutes.values())
        self._bar = tqdm(
            total=total, desc="reproduce", bar_format=shape.replace("{total_time}", f"{total:.0f} min"), file=sys.stderr,
            leave=False, dynamic_ncols=True, disable=quiet or not minutes,
        )  # fmt: skip

    def __enter__(self) -> _Gauge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._bar.close()

    def at(self, name: str, minutes: float) -> None:
        """An experiment has run so long."""
        self._bar.set_description_str(name, refresh=False)
        self._bar.n = self._past + min(minutes, _NEARLY * self._minutes[name])
        self._bar.refresh()

    def done(self, name: str) -> None:
        self._past += self._minutes[name]
        self._bar.n = self._past
        self._bar.refresh()

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)
