"""`spu-llm` in processes of their own that start fast: a server that has imported everything forks for each."""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["spu_llm.cli"])


@dataclass
class Running:
    """A command at work; what it says goes to files."""

    process: ForkServerProcess
    out: Path
    errors: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s: {self.errors.read_text()}"
        return self.process.exitcode


def start(arguments: list[str], folder: Path, name: str) -> Running:
    """Begin `spu-llm ARGUMENTS` in a folder."""
    out, errors = folder / f"{name}.out", folder / f"{name}.err"
    for path in (out, errors):
        path.touch()
    process = CONTEXT.Process(target=_work, args=(arguments, folder, out, errors), daemon=True)
    process.start()
    return Running(process, out, errors)


def _work(arguments: list[str], folder: Path, out: Path, errors: Path) -> None:
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    from spu_llm.cli import main

    main(arguments)
