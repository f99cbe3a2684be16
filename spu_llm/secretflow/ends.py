"""What runs at each PYU: the ends of client and owner, which hold a key in common with the dealer, and the dealer.

Each lives as an actor of its party (`secretflow.proxy`), so keys, the text and the weights never leave it but as said here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import disable_x64

from ..dealer.generator import receive
from ..dealer.material import Specification
from ..dealer.prg import KEY_BYTES
from ..dealer.store import Counter
from ..errors import UserError
from ..generation.assisted import LOGIT_BITS, AssistedDecoder
from ..generation.generate import Step
from ..generation.material import NoParties
from ..generation.sampling import Sampler, SamplingConfig
from ..models.published import publish
from ..runtime import shares
from ..runtime.assisted import Assisted, OperandName
from ..runtime.supply import Masks, Run, operand_mask
from .device import to_chunks, to_share
from .model import OwnerModel, PublicFacts

Message = tuple[int, bytes]
"""The number of a run, which never comes again, and what the dealer sends a party for it."""


class PartyEnd:
    """A party's end of the dealer's channel. Its key is new in every decoder, so no mask of an earlier one can come back."""

    def __init__(self, rank: int):
        self._rank = rank
        self._key = os.urandom(KEY_BYTES)
        self._last = -1
        self._specifications: list[Specification] = []

    def key(self) -> bytes:
        """For the dealer alone."""
        return self._key

    def learn(self, specification: Specification) -> None:
        """Know the material of one more program, by the order of learning."""
        self._specifications.append(specification)

    def expand(self, program: int, message: Message) -> Any:
        """This party's share of a run's material, as chunks for its SPU. UserError for a message that was used before."""
        number, data = message
        if number <= self._last:
            raise UserError(f"material {number} was used before, or is out of order: its masks must not serve again")
        self._last = number
        return to_chunks(receive(self._specifications[program], self._rank, self._key, number, data))


class ClientEnd(PartyEnd):
    """The client's: knows the text."""

    def begin(self, prompt: Any, sampling: SamplingConfig) -> int:
        """Take a prompt, token ids; gives its length, which is public."""
        self._tokens = [int(token) for token in np.asarray(prompt).reshape(-1)]
        self._sampler = Sampler(sampling)
        return len(self._tokens)

    def one_hots(self, which: str, at: int, shape: tuple[int, int], rows: int, vocabulary: int) -> np.ndarray:
        """One-hots `shape` of tokens from the one numbered `at`: of their block of `rows` table rows, or of the row within it."""
        tokens = np.asarray(self._tokens[at : at + shape[0]])
        if not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise UserError(f"the prompt has a token outside the model's vocabulary of {vocabulary}; use the model's tokenizer")
        return np.eye(shape[1], dtype=np.int64)[tokens // rows if which == "block" else tokens % rows]

    def step(self, own: list[np.ndarray], other: list[np.ndarray], violations: list[np.ndarray], vocabulary: int) -> Step:
        """The next token, from both parties' parts of its logits. UserError where a lookup's input was out of range."""
        if np.sum(violations, dtype=np.int64):
            raise UserError(
                "range check: a value left its table during this pass, so its result is void; calibrate on text like this one, or "
                "give the model a prefix that takes its outliers"
            )
        logits = shares.join_words([*own, *other], own[0].shape)[:vocabulary]
        token = self._sampler(logits)
        self._tokens = [token]
        return Step(token, logits)


class OwnerEnd(PartyEnd):
    """The owner's: knows the model, and gives it away under masks only."""

    def open(self, model: OwnerModel, capacity: int) -> PublicFacts:
        """Encode the model for the ring; gives what all may know of it."""
        with disable_x64():
            collected = _Collected(model, capacity)
            collected.place_weights()
        self._operands, self._plain = collected.owned.operands, collected.owner.plain
        return PublicFacts(publish(model.decoder.config, model.prefix, model.calibration), capacity)

    def opened(self, name: str) -> np.ndarray:
        """An operand minus its mask: uniform, so public. Once only: masked again it would be the same."""
        value = self._operands[name][0]
        return value - operand_mask(self._key, name, value.shape, 0)

    def share(self, name: str) -> Any:
        """The owner's share of an operand, all of it or of its mask (see `OperandSlot`), as chunks; it is then forgotten."""
        value, transposed, grows = self._operands.pop(name)
        own = operand_mask(self._key, name, value.shape, 0) if grows else value
        return to_chunks(own.T if transposed else own)

    def plain(self, name: str) -> np.ndarray:
        """A bias, to be shared as it is."""
        return self._plain.pop(name)


class DealerEnd:
    """The dealer's: knows masks, shapes and positions, no input, weight, opening or output."""

    def begin(self, client_key: bytes, owner_key: bytes) -> None:
        self._keys = client_key, owner_key
        self._masks = Masks(self._keys)
        self._counter = Counter(None)
        self._specifications: list[Specification] = []

    def operand(self, name: str, shape: tuple[int, ...], rank: int) -> None:
        """Make the mask of an operand, which its owner makes too."""
        self._masks.operand_mask(name, shape, rank)

    def learn(self, specification: Specification) -> None:
        self._specifications.append(specification)

    def deal(
        self, program: int, operands: Mapping[str, str], keeps: Mapping[str, str], publics: Mapping[str, int]
    ) -> tuple[Message, Message]:
        """What client and owner are sent for one run."""
        number, first, second = self._deal(program, operands, keeps, publics)
        return (number, first), (number, second)

    def deal_whole(self, program: int, operands: Mapping[str, str], keeps: Mapping[str, str], publics: Mapping[str, int]) -> Any:
        """The whole material of one run, for SecretFlow to share."""
        number, *messages = self._deal(program, operands, keeps, publics)
        specification = self._specifications[program]
        parts = [receive(specification, rank, self._keys[rank], number, message) for rank, message in enumerate(messages)]
        return parts[0] + parts[1]

    def _deal(self, program: int, *names: Mapping[str, Any]) -> tuple[int, bytes, bytes]:
        number = self._counter.take()
        return number, *self._masks.deal(Run(self._specifications[program], *names), number)


class _Collected(AssistedDecoder):
    """The owner's model as an `AssistedDecoder` would place it, kept by name instead."""

    def __init__(self, model: OwnerModel, capacity: int):
        self.owner = _Kept()
        super().__init__(self.owner, model.decoder, model.calibration, capacity, model.prefix, prefix_rows=model.prefix_rows)
        self.assisted = self.owned = _KeptOperands(self.owner)


class _Kept(NoParties):
    """Keeps what is shared by the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: dict[str, np.ndarray] = {}

    def share(self, name: str, value: np.ndarray, owner: str) -> None:
        self.plain[name] = value


class _KeptOperands(Assisted):
    """Keeps operands: value, whether their shares are transposed, whether they grow."""

    operands: dict[str, tuple[np.ndarray, bool, bool]]

    def __init__(self, session: NoParties):
        super().__init__(session)
        self.operands = {}

    def mask_operand(self, name: str, value: np.ndarray, owner: str, transposed: bool = False, grows: bool = False) -> OperandName:
        self.operands[name] = value, transposed, grows
        return OperandName(name)

    def turn(self, operand: OperandName, value: np.ndarray, owner: str) -> OperandName:
        turned = OperandName(operand.name, turned=True)
        self.operands[turned.variables[1]] = value, True, False
        return turned


def narrow(io_info: Any, *chunks: bytes) -> list[np.ndarray]:
    """What a party gives of its share of the logits: 4 bytes an element (see `shares.narrow_words`)."""
    return shares.narrow_words(to_share(io_info, chunks), 0, LOGIT_BITS)


def summed(*parts: Any) -> np.ndarray:
    """The sum of a party's shares of single numbers, from their infos and chunks in turn."""
    words = [shares.additive_words(to_share(info, [chunk])) for info, chunk in zip(parts[::2], parts[1::2], strict=True)]
    return np.sum(words, dtype=np.int64)
