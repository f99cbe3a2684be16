"""Runs a server, if asked kills it within its third token and starts it again, and writes what each life did and took.

python experiments/arhe_service/serve.py whole|killed FILE OUT COMMAND...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SERVED_BEFORE = 2


def main(kind: str, file: Path, out: Path, command: list[str]) -> None:
    lives = [_killed(command, out)] if kind == "killed" else []
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read()
    lives.append(_ended(process, began) | json.loads(said))
    file.write_text(json.dumps(lives) + "\n")


def _killed(command: list[str], out: Path) -> dict[str, float]:
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        before = _when(out, SERVED_BEFORE - 1)
        time.sleep((_when(out, SERVED_BEFORE) - before) / 2)
    finally:
        process.kill()
        took = _ended(process, began)
    return took


def _ended(process: subprocess.Popen[bytes], began: float) -> dict[str, float]:
    """By the clock, and on the core: other work may have shared it."""
    usage = os.wait4(process.pid, 0)[2]
    return {"elapsed_seconds": time.monotonic() - began, "core_seconds": usage.ru_utime + usage.ru_stime}


def _when(out: Path, tokens: int) -> float:
    """Waits until the response holds so many tokens; the moment."""
    while _tokens(out) < tokens:
        time.sleep(0.05)
    return time.monotonic()


def _tokens(out: Path) -> Any:
    path = out / "response" / "response.json"
    return json.loads(path.read_text())["tokens"] if path.exists() else 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
