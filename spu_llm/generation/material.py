"""Material for one generation, dealt ahead to a folder: the decoder's own order of runs, but no parties, weights or tokens."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from ..dealer.store import MaterialStore
from ..errors import UserError
from ..models.published import Published
from ..progress import Progress, silent
from ..runtime import Phase, Program, ProtocolConfig, Session
from ..runtime.supply import (
    FIRST_RUN,
    PARTIES,
    Masks,
    Run,
    StoredSupply,
    Supply,
    new_keys,
    party_folder,
    put_message,
    with_store,
    write_keys,
)
from .assisted import AssistedDecoder

_FACTS = "material.json"
_PAUSE = 0.1


@dataclass(frozen=True)
class Facts:
    """What a folder's material is for; public. Token counts: of the prefix, the prompt, and at most to be generated.

    draft: tokens of each draft, where the passes after the prompt's verify drafts; as many passes as if none were accepted.
    """

    model: str
    prefix: int
    prompt_tokens: int
    new_tokens: int
    capacity: int
    draft: int = 0

    @property
    def passes(self) -> list[int]:
        """Tokens of each pass: the last generated one needs none."""
        return [self.prompt_tokens, *[1 + self.draft] * (self.new_tokens - 1)]

    def save(self, folder: Path) -> None:
        (folder / _FACTS).write_text(json.dumps(asdict(self)))


def open_material(folder: Path, wanted: Facts, patience: float = 0.0) -> StoredSupply:
    """The supply of a generation from a folder that was dealt for it, which is used up from here on.

    UserError, with nothing used up, where the folder is for another generation, or was used before.
    """
    try:
        found = Facts(**json.loads((folder / _FACTS).read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder}: holds no dealt material; make it with `spu-llm deal --out {folder}`") from None
    for name, value in asdict(wanted).items():
        dealt = getattr(found, name)
        if dealt < value if name == "new_tokens" else dealt != value:
            raise UserError(
                f"{folder}: was dealt for {name} {dealt}, but this run has {value}; deal to another folder with "
                f"`spu-llm deal --model {wanted.model} --prompt-tokens {wanted.prompt_tokens} --tokens {wanted.new_tokens} "
                f"--capacity {wanted.capacity} --out FOLDER`"
            )
    return StoredSupply(folder, patience)


Make = Callable[[Session, Published, int, Supply, bool], AssistedDecoder]
"""Makes the decoder of whoever has no weights, as `blind_decoder` does."""


def blind_decoder(session: Session, model: Published, capacity: int, supply: Supply, appends: bool = False) -> AssistedDecoder:
    """The decoder of whoever has no weights: a client in a process of its own, and the dealer."""
    rows = model.prefix_rows
    return AssistedDecoder(session, model.decoder, model.calibration, capacity, model.prefix, None, supply, rows, appends)


class AheadDealer:
    """The dealer of one generation: `advance`, `score`, `roll_back` as its decoder will; the messages come to lie in `folder`.

    It is given what the model's owner publishes. Each run's messages are written before the next is dealt, so it holds one run's
    and the masks. Raises UserError where the folder has material already.
    """

    def __init__(self, model: Published, facts: Facts, folder: Path, make: Make = blind_decoder):
        self.folder = folder
        self._supply = _FolderSupply(folder)
        self._decoder = make(NoParties(), model, facts.capacity, self._supply, facts.draft > 0)
        self._supply.begin()
        facts.save(folder)
        self._lasts: list[int] = []

    def set_up(self, prompt_tokens: int = 1, progress: Progress = silent) -> None:
        """Make the operands' masks and trace the programs."""
        self._decoder.set_up(prompt_tokens, progress)

    def advance(self, count: int) -> None:
        """Deal for a pass of `count` tokens."""
        self._decoder.advance([0] * count)
        self._lasts.append(self._supply.next - 1)

    def score(self, count: int) -> None:
        """Deal for a pass of `count` tokens whose logits are all wanted."""
        self._decoder.score([0] * count)
        self._lasts.append(self._supply.next - 1)

    def roll_back(self, length: int) -> None:
        """As the decoder will, where that is known."""
        self._decoder.roll_back(length)

    def wait(self, ahead: int, patience: float = inf) -> None:
        """Return when fewer than `ahead` of the passes dealt so far are still to be used up.

        UserError where nothing was used for `patience` seconds.
        """
        left, since = 0, time.monotonic()
        while len(self._lasts) >= ahead:
            unused = [self._unused(rank) for rank in PARTIES]
            if not any(self._lasts[-ahead] in each for each in unused):
                return
            if sum(map(len, unused)) != left:
                left, since = sum(map(len, unused)), time.monotonic()
            if time.monotonic() - since > patience:
                raise UserError(f"{self.folder}: nothing was used for {patience:g} seconds, so no more is dealt; deal anew")
            time.sleep(_PAUSE)

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes of messages for each party so far."""
        return self._supply.sent[0], self._supply.sent[1]

    @property
    def runs(self) -> int:
        return self._supply.next - FIRST_RUN

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of messages that lie in the folder now."""
        sizes = 0
        for path in self.folder.glob("party-*/*.material"):
            try:
                sizes += path.stat().st_size
            except FileNotFoundError:  # its party has just taken it
                continue
        return sizes

    def _unused(self, rank: int) -> list[int]:
        return with_store(party_folder(self.folder, rank), MaterialStore.available)


def deal_generation(
    dealer: AheadDealer, facts: Facts, ahead: int | None = None, progress: Progress = silent, patience: float = inf
) -> None:
    """Deal for all passes of a generation; with `ahead`, never for more passes than that before the parties use some up.

    UserError where they use nothing for `patience` seconds.
    """
    dealer.set_up(facts.prompt_tokens, progress)
    for i, count in enumerate(progress(facts.passes, "dealing", "pass")):
        if ahead is not None:
            dealer.wait(ahead, patience)
        (dealer.score if facts.draft and i else dealer.advance)(count)


class _FolderSupply:
    """The dealer's end of a `StoredSupply`: deals each run to the parties' folders instead of to parties."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._keys = new_keys()
        self._dealer = Masks(self._keys)
        self.next = FIRST_RUN
        self.sent = [0, 0]

    def begin(self) -> None:
        """Write the keys, and the mark that says whether masks were taken."""
        write_keys(self._folder, self._keys)
        for rank in PARTIES:
            self._put(rank, 0, b"", b"")

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        return self._dealer.operand_mask(name, shape, rank)

    def provide(self, session: Session, run: Run, name: str) -> None:
        messages, digest = self._dealer.deal(run, self.next), run.digest()
        for rank, message in enumerate(messages):
            self._put(rank, self.next, digest, message)
            self.sent[rank] += len(message)
        self.next += 1

    def _put(self, rank: int, number: int, digest: bytes, message: bytes) -> None:
        folder = party_folder(self._folder, rank)
        try:
            put_message(folder, self._keys[rank], number, digest, message)
        except OSError as error:
            raise UserError(
                f"{folder}: material {number} cannot be written ({error.strerror}); make room, or use --ahead"
            ) from None


class NoParties(Session):
    """A session in which nobody takes part: what is given to it is dropped, and programs are traced but not compiled."""

    runs_ahead = False

    def __init__(self) -> None:
        self.protocol = ProtocolConfig()
        self.phases = defaultdict(Phase)
        self.parties = []
        self._phase = "setup"

    def share(self, name: str, value: np.ndarray, owner: str) -> None:
        """Nobody is there to share it."""

    def publish(self, name: str, value: ArrayLike) -> None:
        """Nobody is there to read it."""

    def publish_from(self, name: str, value: np.ndarray, owner: str) -> None:
        """Nobody is there to read it."""

    def compile(self, name: str, function: Callable, arguments: tuple) -> Program:
        leaf = jax.tree_util.tree_structure(0)
        return Program(name, "", leaf, leaf)

    def run(self, program: Program, arguments: tuple, results: Any) -> None:
        """Nobody is there to run it."""

    def receive_narrow(self, name: str, scale_bits: int, row: int | None = None) -> np.ndarray:
        return np.zeros((1, 0))

    def give(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.zeros((), np.int64)

    def _each(self, work: Callable[[Any], Any]) -> list[Any]:
        return []
