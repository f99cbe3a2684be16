"""Linear layers on weights that were sent once, encrypted (encrypted_layer.py), against CHEETAH's own product of the same matrices.

    python experiments/post_nimbus/outer_product.py --out experiments/post_nimbus/result.json

Needs seal-python beside the project's packages (run.sh). Weights are a real layer's, in SPU's 18 fraction bits; activations are
random, shared in a CHEETAH session of two parties. The encrypted layer takes its input from there and leaves its result there,
truncated, so that a program could go on with it. Every result is checked against the product of the integers, exactly (truncated
ones to the last units), or the run fails. Seconds are of the processor, on one core, both parties' added up; bytes and messages
are counts; all are means over several runs. What the result file has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import encrypted_layer
import jax.numpy as jnp
import numpy as np
from encrypted_layer import DEGREE, DROPPED_BITS, KEPT_BITS, KEY_BITS, RING_BITS, Blocks, Client, Lattice, Owner, Rows
from spu import libspu

from spu_llm.experiment.schema import load_model, load_network
from spu_llm.models import load_checkpoint
from spu_llm.runtime import Program, ProtocolConfig, Session, Slot, shares

TOKENS = (1, 9, 17)
NETWORKS = ("lan", "wan")
PACKINGS = {"rows": Rows, "blocks": Blocks}
_BITS = 18
_UNITS = 2.0  # by which truncated results may be off
_SPARE = 64 - RING_BITS
_FACTORS = {"2^-bits": 2.0**-_BITS, "2^-spare": 2.0**-_SPARE}
_WIDEST = 1536
_RING_MASK = np.uint64((1 << RING_BITS) - 1)


@dataclass(frozen=True)
class Layer:
    """A weight matrix as integers int64 [inputs, outputs] with _BITS fraction bits."""

    name: str
    weights: np.ndarray

    def activations(self, tokens: int) -> np.ndarray:
        """Normed ones in size: int64 [tokens, inputs] with _BITS fraction bits."""
        values = np.random.default_rng(tokens).standard_normal((tokens, len(self.weights)))
        return np.round(values * 2.0**_BITS).astype(np.int64)


@dataclass
class Cost:
    """seconds: of the processor, both parties' together. bytes, messages: what client and owner send."""

    seconds: float = 0.0
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    messages: list[int] = field(default_factory=lambda: [0, 0])

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            [a + b for a, b in zip(self.bytes, other.bytes, strict=True)],
            [a + b for a, b in zip(self.messages, other.messages, strict=True)],
        )

    def part(self, divisor: int) -> Cost:
        """One of so many equal runs."""
        sent = [round(value / divisor) for value in self.bytes], [round(value / divisor) for value in self.messages]
        return Cost(self.seconds / divisor, *sent)

    def figures(self) -> dict[str, Any]:
        """With the time on networks: one party's messages (the larger number) wait for each other."""
        networks = {name: load_network(name).seconds(self.seconds, max(self.messages), max(self.bytes)) for name in NETWORKS}
        return asdict(self) | {f"{name}_seconds": seconds for name, seconds in networks.items()}


@contextmanager
def timed() -> Iterator[Cost]:
    cost, begun = Cost(), time.process_time()
    yield cost
    cost.seconds = time.process_time() - begun


def mean(costs: Iterable[Cost]) -> Cost:
    listed = list(costs)
    return sum(listed, Cost()).part(len(listed))


class CheetahSession(Session):
    """With what a layer outside SPU needs: variables of the parties' own words."""

    def place_words(self, name: str, words: tuple[np.ndarray, ...]) -> None:
        """Make a secret real variable of each party's additive share uint64 modulo 2^64; nothing is sent."""

        def work(party: Any) -> None:
            share = shares.additive(words[party.rank].view(np.int64), self.protocol.ring)
            meta = libspu.ValueMeta()
            meta.ParseFromString(share.meta)
            meta.data_type = libspu.DataType.DT_F32
            meta.storage_type = f"cheetah.AShr<{self.protocol.ring}>"
            share.meta = meta.SerializeToString()
            party.runtime.set_var(name, share)

        self._each(work)

    def timed_run(self, program: Program, names: tuple[str, ...], result: str) -> Cost:
        with self.phase(f"{program.name} {time.monotonic_ns()}") as phase, timed() as cost:
            self.run(program, names, result)
        return cost + Cost(0.0, [sent.bytes for sent in phase.sent], [sent.messages for sent in phase.sent])


# CHEETAH's own


def prepare(session: CheetahSession) -> None:
    """SPU makes keys with its first product, and what its oblivious transfers need with its first two truncations of this size."""
    x = np.ones((max(TOKENS), _WIDEST), np.float32)
    session.share("x", x, "client")
    cut = session.compile("cut", lambda x: x * np.float32(0.5), (Slot(x.shape),))
    for _ in range(2):
        session.run(cut, ("x",), "y")
    square = session.compile("square", lambda x: x[:, :8] @ x[:8, :8], (Slot(x.shape),))
    session.run(square, ("x",), "y")


def stock(session: CheetahSession, layer: Layer, tokens: int, repeats: int, private: bool) -> dict[str, Any]:
    """SPU's product of reals, truncated."""
    x, w = layer.activations(tokens), layer.weights
    real = {"x": (x / 2.0**_BITS).astype(np.float32), "w": (w / 2.0**_BITS).astype(np.float32)}
    session.share("x", real["x"], "client")
    (session.share_operand if private else session.share)("w", real["w"], "owner")
    program = session.compile("product", jnp.matmul, (Slot(x.shape), Slot(w.shape)))
    found = mean(session.timed_run(program, ("x", "w"), "y") for _ in range(repeats)).figures()
    off = np.abs(session.receive("y") * 2.0**_BITS - x @ w / 2.0**_BITS).max()
    check(off <= _UNITS, f"CHEETAH's product of {layer.name}, {tokens} tokens, is off by {off}")
    return found


# Encrypted weights


def shortened(z: jnp.ndarray, factor: jnp.ndarray) -> jnp.ndarray:
    """A product with 2^-n is one with 2^(_BITS - n), of which SPU then cuts _BITS."""
    return z * factor


def leave_in_spu(session: CheetahSession, program: Program, words: tuple[np.ndarray, np.ndarray]) -> Cost:
    """The product's shares modulo 2^RING_BITS become the real "y" with _BITS fraction bits in SPU's ring of 64 bits.

    Times 2^_SPARE they are shares modulo 2^64 of that multiple of the product, of which SPU's truncation makes the product's upper
    bits: times 2^-_BITS and then 2^-_SPARE, a run each, as the compiler would multiply the factors first, which gives 0.
    """
    with timed() as cost:
        session.place_words("y", tuple(word << np.uint64(_SPARE) for word in words))
    for name in _FACTORS:
        cost += session.timed_run(program, ("y", name), "y")
    return cost


def encrypted(session: CheetahSession, lattice: Lattice, layer: Layer, packing: Any, repeats: int) -> dict[str, Any]:
    inputs, outputs = layer.weights.shape
    with timed() as making:
        owner = Owner(lattice, layer.weights, packing(outputs))
        sent = owner.set_up()
    with timed() as taking:
        client = Client(lattice, owner.public_key, packing(outputs), sent)
    found = {
        "ciphertexts": len(sent),
        "setup": {
            "bytes": sum(map(len, sent)) + len(owner.public_key.to_string()),
            "owner_seconds": making.seconds,
            "client_seconds": taking.seconds,
            "client_memory_bytes": encrypted_layer.memory_bytes(len(sent)),
        },
        "tokens": {},
    }
    check(len(sent) == encrypted_layer.ciphertexts(inputs, outputs, packing), f"{layer.name}: {len(sent)} ciphertexts")
    del sent
    for tokens in TOKENS:
        found["tokens"][str(tokens)] = multiplied(session, client, owner, layer, tokens, repeats)
    return found


def multiplied(session: CheetahSession, client: Client, owner: Owner, layer: Layer, tokens: int, repeats: int) -> dict[str, Any]:
    """One product on a variable of the session, so many times; the last one's result is checked."""
    x = layer.activations(tokens)
    session.share("x", x, "client")
    for name, value in _FACTORS.items():
        session.publish(name, np.float32(value))
    shorten = session.compile("shortened", shortened, (Slot((tokens, layer.weights.shape[1])), Slot((), public=True)))
    runs = [once(session, client, owner, tokens) for _ in range(repeats)]
    whole, words = x @ layer.weights, runs[-1].words
    check(
        np.array_equal((words[0] + words[1]) & _RING_MASK, whole.view(np.uint64) & _RING_MASK),
        f"the encrypted product of {layer.name}, {tokens} tokens, is wrong",
    )
    handed = mean(leave_in_spu(session, shorten, words) for _ in range(repeats))
    off = np.abs(session.receive("y") * 2.0**_BITS - whole / 2.0**_BITS).max()
    check(off <= _UNITS, f"what SPU is given of {layer.name}, {tokens} tokens, is off by {off}")
    product = mean(run.product for run in runs)
    return {
        "product": product.figures() | {"client_seconds": mean(run.client for run in runs).seconds},
        "truncated": (product + handed).figures(),
        "handed": handed.figures(),
        "ahead_seconds": mean(run.ahead for run in runs).seconds,
        "noise_bits_left": min(run.noise_left for run in runs),
        "hidden_bits_a_reply": min(run.hidden for run in runs),
    }


@dataclass(frozen=True)
class Multiplied:
    """client: what of the product is the client's work. ahead: done before its input is known. words: shares of the product."""

    product: Cost
    client: Cost
    ahead: Cost
    noise_left: int
    hidden: float
    words: tuple[np.ndarray, np.ndarray]


def once(session: CheetahSession, client: Client, owner: Owner, tokens: int) -> Multiplied:
    with timed() as ahead:
        covers, client_words = client.cover(tokens)
    with timed() as at_client:
        client_share, owner_share = (words.view(np.uint64) & _RING_MASK for words in session.words("x"))
        products = client.products(client_share, covers)
    budget = min(map(owner.noise_budget, products))
    with timed() as replying:
        replies = client.replies(products, tokens)
    with timed() as at_owner:
        owner_words = owner.finish(replies, owner_share)
    sent = Cost(bytes=[sum(map(len, replies)), 0], messages=[1, 0])
    at_client += replying
    left = min(map(owner.noise_budget, products))
    whole = at_client + at_owner + sent
    return Multiplied(whole, at_client, ahead, left, encrypted_layer.hidden_bits(budget), (client_words, owner_words))


# Everything


def whole_model(name: str) -> dict[str, Any]:
    """What the client would hold of a model: its layers' kernels and the output layer."""
    decoder = load_checkpoint(load_model(name).locate()).decoder
    kernels = [part["kernel"].shape for layer in decoder.params["layers"] for part in layer.values() if "kernel" in part]
    shapes = [*kernels, decoder.head_table.T.shape]
    found: dict[str, Any] = {"weights": int(sum(np.prod(shape) for shape in shapes)), "products": len(shapes)}
    for key, packing in PACKINGS.items():
        count = sum(encrypted_layer.ciphertexts(*shape, packing) for shape in shapes)
        found[key] = {"ciphertexts": count, "client_memory_bytes": encrypted_layer.memory_bytes(count)}
    return found


def layers() -> list[Layer]:
    def read(model: str, part: str, outputs: int) -> np.ndarray:
        kernel = load_checkpoint(load_model(model).locate()).decoder.params["layers"][0][part]["kernel"][:, :outputs]
        return np.round(np.asarray(kernel, np.float64) * 2.0**_BITS).astype(np.int64)

    return [Layer("kjv, layer 0, up", read("kjv", "up", 1024)), Layer("smollm2, layer 0, gate", read("smollm2", "gate_up", 1536))]


def check(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(what)


class Results:
    """A JSON file of parts, written as they are measured."""

    def __init__(self, path: Path):
        self._path = path
        self._parts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def add(self, place: tuple[str, ...], make: Callable[[], Any]) -> None:
        parts = self._parts
        for key in place[:-1]:
            parts = parts.setdefault(key, {})
        if place[-1] not in parts:
            parts[place[-1]] = make()
            self._path.write_text(json.dumps(self._parts, indent=1) + "\n")


def parameters() -> dict[str, Any]:
    return {
        "ring_bits": RING_BITS,
        "degree": DEGREE,
        "modulus_bits": [KEPT_BITS, *DROPPED_BITS],
        "key_modulus_bits": KEPT_BITS + sum(DROPPED_BITS) + KEY_BITS,
        "most_bits_for_128_bit_security": encrypted_layer.most_modulus_bits(),
    }


def measure(results: Results, repeats: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results.add(("parameters",), parameters)
    for name in ("kjv", "smollm2"):
        results.add(("whole models", name), partial(whole_model, name))
    lattice = Lattice()
    with CheetahSession(ProtocolConfig(name="CHEETAH")) as session:
        prepare(session)
        for layer in layers():
            for key, packing in PACKINGS.items():
                results.add((layer.name, key), partial(encrypted, session, lattice, layer, packing, repeats))
        measure_stock(results, session, "shared weights", repeats)
        measure_stock(results, session, "private weights", repeats)


def measure_stock(results: Results, session: CheetahSession, key: str, repeats: int) -> None:
    for layer in layers():
        for tokens in TOKENS:
            run = partial(stock, session, layer, tokens, repeats, private=key.startswith("private"))
            results.add((layer.name, key, str(tokens)), run)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the first lines of this file.")
    parser.add_argument("--out", type=Path, required=True, help="Where the result goes, JSON.")
    parser.add_argument("--repeats", type=int, default=2, help="Runs of which means are taken.")
    arguments = parser.parse_args()
    measure(Results(arguments.out), arguments.repeats)


if __name__ == "__main__":
    main()
