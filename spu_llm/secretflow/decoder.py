"""Decoding on a SecretFlow device, in a few lines of a user's own SecretFlow code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation.assisted import AssistedDecoder
from ..generation.sampling import SamplingConfig
from ..progress import Progress, silent
from ..runtime.assisted import VIOLATION, Assisted
from ..runtime.session import Session
from ..runtime.supply import Run
from .dealing import Delivery, Line
from .device import DeviceSession, check_device, chunk_count
from .ends import ClientEnd, DealerEnd, OwnerEnd, narrow, summed
from .model import PublicFacts

_RANKS = {"client": 0, "owner": 1}


class SecretFlowDecoder:
    """A model of `owner`, ready to answer prompts of `client` on `device`, with correlated randomness of `dealer`.

        device = sf.SPU({"nodes": [...alice, bob...], "runtime_config": {"protocol": "SEMI2K", "field": "FM64"}})
        with SecretFlowDecoder(device, alice, bob, carol, bob(load_model)("smollm2"), capacity=64) as decoder:
            for step in decoder.generate(alice(lambda: [504, 3575])(), new_tokens=8):
                alice(print)(step)

    `model`: an `OwnerModel` on the owner's PYU. Weights are masked and opened, and stay on the device, when this is made; the cache
    stays there from one prompt to the next. The client learns its logits, to 2^-16; all learn the numbers of tokens and what
    `PublicFacts` says; nobody anything else (docs/leakage.md). Keys are new in every decoder, material in every run of a program.
    """

    def __init__(
        self,
        device: Any,
        client: Any,
        owner: Any,
        dealer: Any,
        model: Any,
        capacity: int,
        delivery: Delivery = "keys",
        progress: Progress = silent,
    ):
        import secretflow

        check_device(device, dealer, [client.party, owner.party])
        actor = secretflow.proxy(secretflow.PYUObject)
        ends = _Ends(
            actor(ClientEnd)(_RANKS["client"], device=client),
            actor(OwnerEnd)(_RANKS["owner"], device=owner),
            actor(DealerEnd)(device=dealer),
        )
        line = Line(device, (ends.client, ends.owner), ends.dealer, delivery)
        facts = secretflow.reveal(ends.owner.open(model, capacity))
        if facts.capacity != capacity:
            raise UserError(f"capacity {capacity}: the owner's process has {facts.capacity}; give all parties the same")
        self._reveal = secretflow.reveal
        self._ends = ends
        self._decoder = _DeviceDecoder(DeviceSession(device, client, owner), ends, line, facts, capacity)
        self._decoder.set_up(progress=progress)

    def __enter__(self) -> SecretFlowDecoder:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Delete weights and cache from the device. Do it before `secretflow.shutdown()`: then nobody is left to delete them."""
        self._decoder.forget()

    @property
    def length(self) -> int:
        """Positions in the cache, the prefix included."""
        return self._decoder.length

    def roll_back(self, length: int | None = None) -> None:
        """Forget all positions from `length` on; all but the prefix by default, as for a new conversation."""
        self._decoder.roll_back(self._decoder.prefix if length is None else length)

    def generate(self, prompt: Any, new_tokens: int, sampling: SamplingConfig | None = None) -> Iterator[Any]:
        """`new_tokens` times a `Step` (token and logits) on the client's PYU, for a prompt of token ids on that PYU.

        Continues what is in the cache, which ends with the last token but one. Each driver is at most a token ahead of the client.
        UserError at the client where a value left its table: what was generated since is void.
        """
        count = self._reveal(self._ends.client.begin(prompt, sampling or SamplingConfig()))
        if count < 1:
            raise UserError("the prompt has no token; write another")
        if self.length + count + new_tokens - 1 > self._decoder.capacity:
            raise UserError(
                f"{self.length} positions in the cache, {count} of the prompt and {new_tokens} new ones exceed the cache capacity "
                f"{self._decoder.capacity}; raise capacity, or roll_back()"
            )
        before = None
        for _ in range(new_tokens):
            step = self._decoder.step(count)
            count = 1
            if before is not None:
                self._reveal(before)
            before = step.device(_done)(step)
            yield step
        if before is not None:
            self._reveal(before)


@dataclass(frozen=True)
class _Ends:
    """The actors of `ends.py`, each on its PYU."""

    client: Any
    owner: Any
    dealer: Any


class _DeviceDecoder(AssistedDecoder):
    """Runs the programs of an `AssistedDecoder` in its order, on shapes: tokens and weights are at the ends."""

    def __init__(self, session: DeviceSession, ends: _Ends, line: Line, facts: PublicFacts, capacity: int):
        model = facts.model
        super().__init__(session, model.decoder, model.calibration, capacity, model.prefix, prefix_rows=model.prefix_rows)
        self.prefix = len(model.prefix)
        self._device, self._ends = session, ends
        self.assisted = self._runs = _DeviceAssisted(session, line)
        self._at = 0
        session.sources = {
            "client": self._one_hots,
            "owner": lambda name, shape: ends.owner.plain(name),
            "opened": lambda name, shape: ends.owner.opened(name.removesuffix(".opened")),
            "placed": lambda name, shape: ends.owner.share(name.removesuffix(".share"), _num_returns=1 + chunk_count(shape)),
        }

    def forget(self) -> None:
        """Delete all variables."""
        self._device.variables.clear()

    def step(self, count: int) -> Any:
        """Take the client's `count` tokens; gives the `Step` that follows, on the client's PYU."""
        start = self.length
        for size in self.passes(count):
            self._at = self.length - start
            self.embed([0] * size)
            self.run_layers(size)
            self.length += size
        self._run_logits(size, range(size - 1, size))
        shape = (1, prod(self._head[1].shape) // self.decoder.config.width)
        own, other = (self._at_pyu(role, narrow)(*self._device.outfeed("logits", role, shape)) for role in _RANKS)
        client = self._device.pyus["client"]
        return self._ends.client.step(own, other.to(client), self._runs.violations(), self.decoder.config.vocabulary)

    def _one_hots(self, name: str, shape: tuple[int, ...]) -> Any:
        which, vocabulary = name.removeprefix("ids."), self.decoder.config.vocabulary
        return self._ends.client.one_hots(which, self._at, shape, self._block_rows, vocabulary)

    def _at_pyu(self, role: str, function: Any) -> Any:
        return self._device.pyus[role](function, num_returns=1)


class _DeviceAssisted(Assisted):
    """Collects the range checks of all runs at the parties' PYUs."""

    def __init__(self, session: DeviceSession, line: Line):
        super().__init__(session, _DeviceSupply(line))
        self._device = session
        self._found: dict[str, list[Any]] = {role: [] for role in _RANKS}

    def _collect(self) -> None:
        for role, parts in self._found.items():
            parts += self._device.outfeed(VIOLATION, role, ())

    def violations(self) -> list[Any]:
        """Each party's share of the sum of all checks since the last time, at the client's PYU: 8 bytes from the owner."""
        client = self._device.pyus["client"]
        sums = [self._device.pyus[role](summed, num_returns=1)(*parts).to(client) for role, parts in self._found.items()]
        self._found = {role: [] for role in _RANKS}
        return sums


@dataclass(frozen=True)
class _DeviceSupply:
    """Has the dealer's end deal for each run."""

    line: Line

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        """The mask is made by the dealer's and by the owner's end; here are zeros."""
        self.line.dealer.operand(name, shape, rank)
        return np.zeros(shape, np.int64)

    def provide(self, session: Session, run: Run, name: str) -> None:
        assert isinstance(session, DeviceSession)
        session.variables[name] = self.line.material(run)


def _done(step: Any) -> bool:
    return True
