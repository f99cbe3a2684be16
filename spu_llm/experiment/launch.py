"""Starts every party of a run as a process of this machine, with a link of the wanted bandwidth and delay between them."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..models import load_checkpoint
from ..models.checkpoint import load_tokenizer
from ..models.tokenizer import need_tokenizer
from ..network.certificates import make_certificates
from ..network.emulation import Relay
from ..network.emulation_check import check_emulation
from ..progress import Progress, silent
from ..runtime.watch import PEER_FAILED
from .metrics import accuracy
from .prompt import encode_prompt
from .schema import Experiment, PartiesConfig
from .sparsity import recall_metrics

_HOST = "127.0.0.1"
_PATIENCE = 3600.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # for the party that failed first to end too, whose own words say why


def measure_apart(
    experiment: Experiment, progress: Progress = silent, stream: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Generate once with the parties as processes, and compare with plaintext; returns the metrics.

    Each process has a config and certificates of its own; the prompt is in the client's alone. Material is all fetched before the
    first pass, so that dealing does not disturb what is timed. Raises UserError with the first failed process's line.
    """
    tokenizer = need_tokenizer(load_tokenizer(experiment.model.locate()), experiment.model)
    prompt = encode_prompt(experiment, tokenizer)
    with tempfile.TemporaryDirectory(prefix="spu_llm.") as scratch, ExitStack() as stack:
        place = _Place(Path(scratch), experiment, stack)
        measured = place.check_link()
        crew = stack.enter_context(_Crew(stream, progress is silent, place.scratch))
        if experiment.ops == "plugin":
            crew.start("dealer", place.dealer_arguments())
        for role in (*experiment.protocol.roles[1:], "client"):
            crew.start(role, place.party_arguments(role))
        crew.wait()
        metrics = json.loads((place.out("client") / "metrics.json").read_text())
        logits = np.fromfile(place.out("client") / "logits.f32", np.float32).reshape(len(metrics["tokens"]), -1)
        others = {role: json.loads((place.out(role) / f"{role}.json").read_text()) for role in experiment.protocol.roles[1:]}
        peaks = {role: facts["peak_rss_bytes"] for role, facts in others.items()}
        metrics["peak_rss_bytes_by_role"] = {"client": metrics["peak_rss_bytes"], **peaks}
        metrics["ranges"] = others["owner"]["ranges"]
        metrics["network"] |= measured | place.carried()
    decoder = load_checkpoint(experiment.model.locate()).decoder
    metrics["accuracy"] = accuracy(decoder, [*experiment.prefix, *prompt], metrics["tokens"], list(logits))
    if experiment.sparsity is not None:
        metrics["comet"] |= recall_metrics(experiment, decoder.config)
    return metrics


class _Place:
    """Addresses, certificates, configs and the network of one run."""

    def __init__(self, folder: Path, experiment: Experiment, stack: ExitStack):
        self._folder, self._experiment = folder, experiment
        self._roles = experiment.protocol.roles
        self._listens = dict(zip((*self._roles, "dealer"), _free_addresses(len(self._roles) + 1), strict=True))
        self._relays: dict[tuple[str, str], Relay] = {}
        if experiment.network.mode == "link":
            pairs = [(a, b) for i, a in enumerate(self._roles) for b in self._roles[i + 1 :]]
            for a, b in pairs:
                self._relays[a, b] = stack.enter_context(Relay(experiment.network, self._listens[a], self._listens[b]))
        all_files = folder / "certificates"
        make_certificates(all_files, (*self._roles, "dealer"), [_HOST])
        for role in (*self._roles, "dealer"):
            self._certificates(role).mkdir(mode=0o700, parents=True)
            for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
                shutil.copy2(all_files / name, self._certificates(role) / name)

    @property
    def scratch(self) -> Path:
        """For the processes' own temporary files, so that none outlives the run."""
        folder = self._folder / "scratch"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def out(self, role: str) -> Path:
        return self._folder / role / "out"

    def check_link(self) -> dict[str, Any]:
        """The emulated link's own round trip and throughput, measured before anything else is."""
        if self._experiment.network.mode != "link":
            return {}
        return {"emulation": check_emulation(self._experiment.network).as_dict()}

    def carried(self) -> dict[str, Any]:
        """What went over each emulated link."""
        found = {f"{a}, {b}": asdict(relay.carried()) for (a, b), relay in self._relays.items()}
        return {"carried": found} if found else {}

    def dealer_arguments(self) -> list[str]:
        folder = self._folder / "dealer"
        where = ["--listen", self._listens["dealer"], "--certificates", str(self._certificates("dealer"))]
        return ["dealer", *where, "--out", str(folder / "out"), "--quiet", "--with-parent"]

    def party_arguments(self, role: str) -> list[str]:
        addresses = {other: self._address(role, other) for other in self._roles} | {"dealer": self._listens["dealer"]}
        waiting = {"prefetch": True, "patience": _PATIENCE}  # one that fails is noticed by the crew
        parties = PartiesConfig.model_validate(addresses | waiting | {"certificates": self._certificates(role)})
        experiment = self._experiment.alone().model_copy(update={"parties": parties, "processes": False})
        if role != "client":
            experiment = experiment.model_copy(update={"generation": experiment.generation.model_copy(update={"prompt": None})})
        if role != "owner":
            experiment = experiment.model_copy(update={"soal": None})  # the owner's secret; the model has its prefix already
        if role != "owner" and experiment.sparsity is not None:
            experiment = experiment.model_copy(update={"sparsity": experiment.sparsity.model_copy(update={"file": None})})
        config = self._folder / role / "run.yaml"
        config.write_text(experiment.model_dump_json(exclude_none=True))
        arguments = ["party", str(config), "--role", role, "--out", str(self.out(role)), "--with-parent"]
        return arguments if role == "client" else [*arguments, "--quiet"]

    def _address(self, role: str, other: str) -> str:
        """Where `role` reaches `other`."""
        for (a, b), relay in self._relays.items():
            if {a, b} == {role, other}:
                return relay.to_b if other == b else relay.to_a
        return self._listens[other]

    def _certificates(self, role: str) -> Path:
        return self._folder / role / "certificates"


@dataclass
class _Process:
    role: str
    process: subprocess.Popen
    said: str = ""

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def error(self) -> str:
        """Its error line, or the last that it said."""
        lines = [line for line in self.said.splitlines() if line.strip()] or ["it said nothing"]
        return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1])


class _Crew:
    """The processes of a run; leaving the context ends those that are left."""

    def __init__(self, stream: Callable[[str], None], quiet: bool, scratch: Path):
        self._stream, self._quiet, self._scratch = stream, quiet, scratch
        self._crew: list[_Process] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._crew:
            each.process.kill()
        for thread in self._threads:
            thread.join()

    def start(self, role: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "spu_llm", *arguments, *(["--quiet"] if role == "client" and self._quiet else [])]
        place = os.environ | {"TMPDIR": str(self._scratch)}
        each = _Process(role, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=place))
        self._crew.append(each)

        def note(text: str) -> None:
            each.said += text
            if role == "client" and "error: " not in text:
                sys.stderr.write(text)

        self._follow(each.process.stdout, self._stream if role == "client" else lambda text: None)
        self._follow(each.process.stderr, note)

    def wait(self) -> None:
        """Until every party is done. UserError where a process failed."""
        parties = [each for each in self._crew if each.role != "dealer"]
        while any(each.process.poll() is None for each in parties) and not any(each.failed for each in self._crew):
            time.sleep(_POLL_SECONDS)
        if not any(each.failed for each in self._crew):
            return
        end = time.monotonic() + _GRACE_SECONDS
        while any(each.process.poll() is None for each in parties) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)  # for its last words to be read
        failed = [each for each in self._crew if each.failed]
        first = next((each for each in failed if PEER_FAILED not in each.error), failed[0])
        raise UserError(f"the {first.role}'s process failed: {first.error}")

    def _follow(self, pipe: Any, say: Callable[[str], None]) -> None:
        """Pass on what a process writes, as it comes."""

        def read() -> None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            while data := os.read(pipe.fileno(), 1 << 16):
                say(decoder.decode(data))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)


def _free_addresses(count: int) -> list[str]:
    """Ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [f"{_HOST}:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()
