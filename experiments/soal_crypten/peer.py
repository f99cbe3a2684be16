"""One decoder layer over a prompt on CrypTen 0.4.1: two local processes over gloo, CrypTen's default settings.

Run by the interpreter that peer_env.sh makes; it needs nothing else of this repository. The layer is written as a CrypTen
user would: every operation is CrypTen's own (`matmul`, `softmax`, `inv_sqrt`, `sigmoid`), weights and input are secret, all
heads are one batch, and query, key and value (gate and up in the Llama family) are one product. Settings are those CrypTen
ships: 16 fraction bits in 64-bit words, exp by 8 squarings, reciprocal by 10 Newton steps, inv_sqrt by 3, maximum by log
reduction. Where there is a choice, the cheaper correct one is taken: GELU is GPT-2's own, 0.5 x (1 + tanh(u)) = x
sigmoid(2u), since CrypTen computes tanh by its sigmoid anyway and its `erf` is wrong (its `pow(5)` is x^6). Query heads share
their key head without a copy. The causal mask adds -200, not minus infinity: CrypTen's exp is (1 + x/256)^256, which explodes
below -512.

What is counted, for one pass after a short one that warms up:

* bytes: what one party sends. CrypTen counts an all_reduce of n words as 2n (one tensor sent, one received), and a
  computation between two parties uses no other collective, so this is half of its counter. `loopback_bytes` is what left the
  machine's loopback interface during the last pass: both parties' bytes, headers, and whatever else ran on the machine. Under
  `unshare --net` (with lo up) nothing else does, and it is 2 * bytes and a few thousandths.
* messages: what one party sends if an opening is one message, CrypTen's count of rounds; tensors opened together count as
  one. Gloo sends two in turn for each (it halves the tensor: reduce-scatter, then all-gather), so a real link waits twice as
  often.
* seconds: by rank 0's clock, from one common start; both processes share the machine's cores. `cpu_seconds`, rank 0's own
  processor time with that of its sending threads, tells whether something else had them. Triples are included: the default
  provider, TrustedFirstParty, draws them in the pass itself, in both processes (rank 1 throws its draws away and keeps the
  sizes), and shares them by common seeds, so they cost no bytes; rank 0, which knows them, could unmask rank 1's inputs.
  `triple_seconds` is rank 0's time in there. `dealer_bytes` is what a dealer would send instead: CrypTen's TrustedThirdParty
  draws all but one share from seeds and sends the last, the product of each triple, to rank 0.
* parts: softmax is scores to probabilities, norm the layer's two norms with their scale and shift, activation GELU or SiLU
  without the gate's product, total the whole layer, from shares to shares.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import crypten
import crypten.communicator
import numpy as np
import torch
from crypten.config import cfg
from crypten.mpc.context import run_multiprocess
from crypten.mpc.provider import TrustedFirstParty

_SEED = 0
_EPSILON = 1e-5
_ROPE_BASE = 10000.0
_MASKED = -200.0
_WARM_UP_TOKENS = 2
_SQRT_2_PI = float(np.sqrt(2 / np.pi))

Weights = dict[str, Any]
"""Arrays or shares by name: kernels [in, out], biases and scales [out]."""


@dataclass(frozen=True)
class Shape:
    """A layer of the GPT-2 or the Llama kind: rope says which."""

    width: int
    heads: int
    kv_heads: int
    ffn: int
    rope: bool

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def qkv(self) -> list[int]:
        """Columns of the query, key and value parts of the fused product."""
        return [self.width, self.kv_heads * self.head, self.kv_heads * self.head]

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters. The Llama kind has no biases."""
        first = self.ffn * 2 if self.rope else self.ffn
        columns = {"qkv": (self.width, sum(self.qkv)), "out": (self.width, self.width)}
        columns |= {"up": (self.width, first), "down": (self.ffn, self.width)}
        found: dict[str, tuple[int, ...]] = {f"{name}.kernel": size for name, size in columns.items()}
        biases: dict[str, tuple[int, ...]] = {f"{name}.bias": size[1:] for name, size in columns.items()}
        for norm in ("attention_norm", "ffn_norm"):
            found[f"{norm}.scale"] = (self.width,)
            biases[f"{norm}.bias"] = (self.width,)
        return found if self.rope else found | biases


SHAPES = {
    "gpt2": Shape(width=768, heads=12, kv_heads=12, ffn=3072, rope=False),
    "smollm2": Shape(width=576, heads=9, kv_heads=3, ffn=1536, rope=True),
}


@dataclass
class Cost:
    """What a part took; the module's docstring says how each is counted."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    messages: int = 0
    bytes: int = 0
    triple_seconds: float = 0.0
    dealer_bytes: int = 0


@dataclass
class Meter:
    """Adds up costs by part, from CrypTen's counters and the time that its provider of triples takes."""

    triples: Cost
    report: Callable[[str], None]
    parts: dict[str, Cost] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.report(f"{name} ...")
        before = self._now()
        yield
        after = self._now()
        cost = self.parts.setdefault(name, Cost())
        for key, value in asdict(after).items():
            setattr(cost, key, getattr(cost, key) + value - getattr(before, key))
        self.report(f"{name}: {after.seconds - before.seconds:.1f} s, {(after.bytes - before.bytes) / 1e6:.1f} MB")

    def _now(self) -> Cost:
        counted = crypten.communicator.get()
        sent = int(counted.comm_bytes) // 2
        made = self.triples
        return Cost(time.perf_counter(), time.process_time(), counted.comm_rounds, sent, made.triple_seconds, made.dealer_bytes)


def watch_triples() -> Cost:
    """Have CrypTen's provider note its time and the bytes of each triple's last share in the Cost that is returned."""
    cost = Cost()

    def watched(make: Callable) -> Callable:
        @wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> tuple:
            start = time.perf_counter()
            made: tuple = make(*args, **kwargs)
            cost.triple_seconds += time.perf_counter() - start
            cost.dealer_bytes += made[-1].share.nelement() * made[-1].share.element_size()
            return made

        return wrapper

    for name in TrustedFirstParty.TRACEABLE_FUNCTIONS:
        setattr(TrustedFirstParty, name, watched(getattr(TrustedFirstParty, name)))
    return cost


@dataclass
class Layer:
    """The layer on shares: input and output [tokens, width]."""

    shape: Shape
    weights: Weights
    meter: Meter

    def __call__(self, x: Any) -> Any:
        with self.meter.part("total"):
            x = x + self._dense("out", self._attention(self._dense("qkv", self._norm("attention_norm", x))))
            return x + self._dense("down", self._ffn(self._dense("up", self._norm("ffn_norm", x))))

    def _dense(self, name: str, x: Any) -> Any:
        y = x.matmul(self.weights[f"{name}.kernel"])
        return y if self.shape.rope else y + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Any) -> Any:
        with self.meter.part("norm"):
            centred = x if self.shape.rope else x - x.mean(-1, keepdim=True)
            spread = centred.square().mean(-1, keepdim=True)
            y = centred * (spread + _EPSILON).inv_sqrt() * self.weights[f"{name}.scale"]
            return y if self.shape.rope else y + self.weights[f"{name}.bias"]

    def _attention(self, qkv: Any) -> Any:
        """[tokens, queries, keys and values] -> [tokens, width]: causal attention of all heads."""
        shape, tokens = self.shape, qkv.size(0)
        group = shape.heads // shape.kv_heads
        q, k, v = (self._heads(part) for part in qkv.split(shape.qkv, dim=-1))
        if shape.rope:
            q, k = rotate(q), rotate(k)
        q = q.reshape(shape.kv_heads, group * tokens, shape.head)  # a group's heads one below the other
        mask = torch.full((tokens, tokens), _MASKED).triu(1).repeat(group, 1)
        scores = q.div(shape.head**0.5).matmul(k.transpose(1, 2)) + mask
        with self.meter.part("softmax"):
            probabilities = scores.softmax(-1)
        mixed = probabilities.matmul(v).reshape(shape.heads, tokens, shape.head)
        return mixed.transpose(0, 1).reshape(tokens, shape.width)

    def _heads(self, x: Any) -> Any:
        """[tokens, heads * head] -> [heads, tokens, head]."""
        return x.reshape(x.size(0), -1, self.shape.head).transpose(0, 1)

    def _ffn(self, h: Any) -> Any:
        if not self.shape.rope:
            with self.meter.part("activation"):
                return h * ((h + h.square() * h * 0.044715) * (2 * _SQRT_2_PI)).sigmoid()
        gate, up = h.split([self.shape.ffn, self.shape.ffn], dim=-1)
        with self.meter.part("activation"):
            gate = gate * gate.sigmoid()
        return gate * up


def rotate(x: Any) -> Any:
    """Rotary positions of [heads, tokens, head], the two halves of a head paired; local, for the angles are public."""
    half = x.size(-1) // 2
    cos, sin = (torch.from_numpy(part.astype(np.float32)) for part in angles(x.size(1), half))
    first, second = x.split([half, half], dim=-1)
    return crypten.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def angles(tokens: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [tokens, half] of the rotary positions."""
    turn = np.outer(np.arange(tokens), _ROPE_BASE ** (-np.arange(half) / half))
    return np.cos(turn), np.sin(turn)


def plain_layer(shape: Shape, weights: Weights, x: np.ndarray) -> np.ndarray:
    """The same layer in float64 numpy, head by head: [tokens, width] -> [tokens, width]."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = x if shape.rope else x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPSILON) * weights[f"{name}.scale"]
        return y + weights.get(f"{name}.bias", 0.0)

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.kernel"] + weights.get(f"{name}.bias", 0.0)

    def turned(x: np.ndarray) -> np.ndarray:
        cos, sin = angles(len(x), shape.head // 2)
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1) if shape.rope else x

    q, k, v = np.split(dense("qkv", norm("attention_norm", x)), np.cumsum(shape.qkv)[:2], -1)
    mixed = []
    for i in range(shape.heads):
        j = i // (shape.heads // shape.kv_heads)
        own, shared = slice(i * shape.head, (i + 1) * shape.head), slice(j * shape.head, (j + 1) * shape.head)
        scores = turned(q[:, own]) @ turned(k[:, shared]).T / np.sqrt(shape.head)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(powers / powers.sum(-1, keepdims=True) @ v[:, shared])
    x = x + dense("out", np.concatenate(mixed, -1))
    h = dense("up", norm("ffn_norm", x))
    if shape.rope:
        gate, up = np.split(h, 2, -1)
        h = gate / (1 + np.exp(-gate)) * up
    else:
        h = 0.5 * h * (1 + np.tanh(_SQRT_2_PI * (h + 0.044715 * h**3)))
    return x + dense("down", h)


def inputs(shape: Shape, tokens: int) -> tuple[Weights, np.ndarray]:
    """Weights, normal with deviation 0.04 (norms' scales are ones), and the layer's input, standard normal; float32."""
    random = np.random.default_rng(_SEED)
    weights = {}
    for name, size in shape.weights().items():
        weights[name] = np.ones(size, np.float32) if name.endswith("scale") else 0.04 * random.standard_normal(size, np.float32)
    return weights, random.standard_normal((tokens, shape.width), np.float32)


def share(array: np.ndarray, owner: int) -> Any:
    """Shares of what the process of that rank knows; the other gives the size alone."""
    mine = crypten.communicator.get().get_rank() == owner
    return crypten.cryptensor(torch.from_numpy(array) if mine else torch.empty(array.shape), src=owner)


def run_party(family: str, tokens: int, repeats: int) -> dict[str, Any]:
    """One process: share (rank 0 owns the weights, rank 1 the input), run the passes, hold the last one against float64."""
    torch.set_num_threads(1)  # one core a party
    cfg.communicator.verbose = True  # CrypTen counts only then
    rank = crypten.communicator.get().get_rank()
    shape = SHAPES[family]
    weights, x = inputs(shape, tokens)
    triples = watch_triples()
    with crypten.no_grad():
        secret = {name: share(array, 0) for name, array in weights.items()}
        secret_x = share(x, 1)
        Layer(shape, secret, Meter(triples, quiet))(secret_x[:_WARM_UP_TOKENS])
        passes = []
        for i in range(repeats):
            title = f"{family}, {tokens} tokens, pass {i + 1} of {repeats}"
            meter = Meter(triples, progress(title) if rank == 0 else quiet)
            crypten.communicator.get().barrier()
            loopback = loopback_bytes()
            y = Layer(shape, secret, meter)(secret_x)
            crypten.communicator.get().barrier()
            loopback = loopback_bytes() - loopback
            passes.append(meter.parts)
        opened = y.reveal().numpy() / y.encoder.scale  # get_plain_text is off by one just above some negative whole numbers
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    double = {name: array.astype(np.float64) for name, array in weights.items()}
    error = np.abs(opened - plain_layer(shape, double, x.astype(np.float64))).max()
    parts = {name: asdict(typical([found[name] for found in passes])) for name in passes[0]}
    return {"parts": parts, "max_error": float(error), "peak_rss_bytes": peak, "loopback_bytes": loopback}


def typical(costs: list[Cost]) -> Cost:
    """The last pass's traffic, which is every pass's, with the median times."""
    last = costs[-1]
    times = {key: median(getattr(cost, key) for cost in costs) for key in ("seconds", "cpu_seconds", "triple_seconds")}
    return replace(last, **times)


def progress(title: str) -> Callable[[str], None]:
    """Prints lines under that title to standard error, with the seconds since now."""
    start = time.perf_counter()
    return lambda line: print(f"[{time.perf_counter() - start:6.1f} s] {title}: {line}", file=sys.stderr, flush=True)


def quiet(line: str) -> None:
    """Progress of what is not to be told."""


def loopback_bytes() -> int:
    """What the loopback interface of this machine, or of this network namespace, has sent so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def machine(load_before: tuple[float, ...]) -> dict[str, Any]:
    """What the figures depend on: the machine, and how busy it was (runnable processes, averages over 1, 5 and 15 minutes)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads_a_party": 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }


def run(family: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Both processes, and their figures in one dictionary. Exits with one line where a party failed, whose trace is above."""
    load = os.getloadavg()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parties = run_multiprocess(world_size=2)(run_party)(family, tokens, repeats)
    if parties is None:
        sys.exit("CrypTen: a party failed, see above; if it was killed, give the machine more memory or take fewer --tokens")
    first = parties[0]
    return {
        "peer": f"CrypTen {crypten.__version__}",
        "family": family,
        "shape": asdict(SHAPES[family]),
        "tokens": tokens,
        "layers": 1,
        "repeats": repeats,
        "parts": first["parts"],
        "max_error": first["max_error"],
        "triple_seconds": first["parts"]["total"]["triple_seconds"],
        "loopback_bytes": first["loopback_bytes"],
        "peak_rss_bytes": [party["peak_rss_bytes"] for party in parties],
        "machine": machine(load),
    }


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure one decoder layer over a prompt on CrypTen 0.4.1, two local processes.",
        epilog="example: peer_env.sh venv && venv/bin/python peer.py --family gpt2 --tokens 64 --out gpt2_64.json",
    )
    parser.add_argument("--family", choices=sorted(SHAPES), required=True, help="shape of the layer")
    parser.add_argument("--tokens", type=positive, required=True, help="tokens of the prompt; 512 take a minute or two and 4 GB")
    parser.add_argument("--layers", type=int, choices=[1], default=1, help="decoder layers; one is measured")
    parser.add_argument("--repeats", type=positive, default=1, help="passes; times are their medians (default: 1)")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON (default: standard output)")
    args = parser.parse_args()
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: no folder {args.out.parent}; make it first")
    return args


def main() -> None:
    args = parse_args()
    found = json.dumps(run(args.family, args.tokens, args.repeats), indent=2) + "\n"
    if args.out is None:
        sys.stdout.write(found)
    else:
        args.out.write_text(found)


if __name__ == "__main__":
    main()
