"""How far an encrypted run strays, by layer. For debugging: everything looked at is decrypted, which takes the secret key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .backend import Backend, Ciphertext
from .calibrate import exact_values
from .executor import Server, decrypted, encrypted
from .graph import Op, Options, build_program
from .meaning import Meaning
from .schedule import Schedule
from .simulator import Simulator
from .slots import places


@dataclass
class Deviations:
    """Largest absolute errors of the last row, by value (a layer's result, the logits), over all passes of a run.

    `noise`: against the simulator, which evaluates the same polynomials: what encryption, products and bootstraps add. `whole`:
    against exact functions: the polynomials' error too; `relative`: its root mean square over the exact row's. `sizes`: the largest
    exact value.
    """

    meaning: Meaning
    schedule: Schedule
    backend: Backend
    prompt: Sequence[int]
    noise: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    relative: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twin = Server(self.meaning, self.schedule, Simulator(self.schedule.parameters))
        self._tokens = list(self.prompt)
        self._exact: dict[str, np.ndarray] = {}
        self._twin.take(encrypted(self._twin.backend, self.meaning.config, self.prompt), len(self.prompt))
        config, program = self.meaning.config, self.schedule.program
        self._full = build_program(config, program.degrees, Options(skip=False), program.slots)

    def watch(self, op: Op, found: list[Ciphertext]) -> None:
        """For `Server.watch`: the twin makes a pass when the first operation of one is reported."""
        if op is self.schedule.program.ops[0]:
            self._advance()
        if op.output not in self._exact or op.name.split(".")[-1] not in ("out", "logits"):
            return
        row, twin = self._row(op, self.backend, found), self._row(op, self._twin.backend, self._twin.values[op.output])
        exact = self._exact[op.output][-1].reshape(-1)
        if op.output == "logits":
            row, twin = (self.meaning.logits(x[: len(exact)]) for x in (row, twin))
        for kept, value in ((self.noise, row - twin), (self.whole, row - exact), (self.sizes, exact)):
            kept[op.output] = max(kept.get(op.output, 0.0), float(np.abs(value).max()))
        relative = float(np.sqrt(np.mean((row - exact) ** 2) / np.mean(exact**2)))
        self.relative[op.output] = max(self.relative.get(op.output, 0.0), relative)

    def facts(self) -> dict[str, dict[str, float]]:
        """As JSON."""
        return {"noise": self.noise, "whole": self.whole, "relative": self.relative, "largest_value": self.sizes}

    def _advance(self) -> None:
        self._exact = exact_values(self.meaning.decoder, self._full, self._tokens)
        self._tokens.append(decrypted(self._twin.backend, self.meaning.config, self._twin.step())[0])

    def _row(self, op: Op, backend: Backend, found: list[Ciphertext]) -> np.ndarray:
        """The last row."""
        program = self.schedule.program
        where = places(program.layouts[op.output], self._twin.span, program.slots)
        return where.read(np.concatenate([backend.decrypt(x) for x in found]))[-1].reshape(-1)
