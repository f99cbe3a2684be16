"""What a server needs to go on, in one file that changes at once: between two tokens or between two operations of a pass.

Ciphertexts and counts alone, nothing of the weights; for this user alone all the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import UserError
from .ciphertexts import packed, unpacked
from .executor import Server, State
from .files import write_bytes
from .keys import PublicKeys

_ANEW = "choose another --out, or drop it with --restart"


@dataclass
class Work:
    """How far a server is: bootstraps of each token that is done, those of the token in the making, listing of the response."""

    identity: dict[str, str]
    performed: list[int] = field(default_factory=list)
    begun: int = 0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def save_state(path: Path, work: Work, server: Server) -> None:
    """Replace the file. What later operations of the pass do not take is left out."""
    store = _Store()
    state = server.state
    live = {value for op in server.program.ops[server.done :] for value in op.inputs} if server.done else set()
    facts = {
        "work": asdict(work),
        "done": server.done,
        "start": store.put(state.start),
        "positions": state.positions,
        "cached": {name: store.put(value) for name, value in state.cached.items()},
        "one_hots": [store.put(value) for value in state.one_hots],
        "prompt": state.prompt,
        "values": {name: store.put(value) for name, value in server.values.items() if name in live},
    }
    text = json.dumps(facts)
    write_bytes(path, save(store.tensors, {"facts": text, "digest": _digest(text, store.tensors)}), private=True)


def load_state(path: Path, identity: Mapping[str, str], server: Server, keys: PublicKeys) -> Work:
    """Put the server where it was. Raises UserError where the file is damaged, or of other work than `identity` says."""
    text, tensors = _read(path)
    facts = json.loads(text)
    for name, digest in identity.items():
        if facts["work"]["identity"].get(name) != digest:
            raise UserError(f"{path}: was left by work with another {name}; {_ANEW}")
    made = {int(name): unpacked(value.tobytes(), keys, path) for name, value in tensors.items()}

    def taken(numbers: Sequence[int]) -> list[Any]:
        return [made[number] for number in numbers]

    server.state = State(
        taken(facts["start"]),
        facts["positions"],
        {name: taken(value) for name, value in facts["cached"].items()},
        [taken(value) for value in facts["one_hots"]],
        facts["prompt"],
    )
    server.values = {name: taken(value) for name, value in facts["values"].items()}
    server.done = facts["done"]
    return Work(**facts["work"])


class _Store:
    """Ciphertexts by number, each once however many values share it."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self._numbers: dict[int, int] = {}

    def put(self, ciphertexts: Sequence[Any]) -> list[int]:
        for x in ciphertexts:
            if id(x) not in self._numbers:
                self._numbers[id(x)] = len(self._numbers)
                self.tensors[str(self._numbers[id(x)])] = np.frombuffer(packed(x), np.uint8)
        return [self._numbers[id(x)] for x in ciphertexts]


def _read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Facts and tensors of a whole file."""
    try:
        with safe_open(path, "numpy") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text, digest = metadata["facts"], metadata["digest"]
    except (OSError, SafetensorError, KeyError, TypeError):
        raise UserError(f"{path}: truncated or no state of a server; {_ANEW}") from None
    if digest != _digest(text, tensors):
        raise UserError(f"{path}: was changed after it was written; {_ANEW}")
    return text, tensors


def _digest(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].nbytes}".encode())
        found.update(tensors[name].tobytes())
    return found.hexdigest()
