"""A whole OPT decoder on CrypTen 0.4.1, a prompt and then token by token: two local processes over gloo, with default settings.

Run by the interpreter that ../soal_crypten/peer_env.sh makes. Settings, and what is counted, are those of ../soal_crypten/peer.py,
whose layer this is, with ReLU and a cache. Rank 0 owns the weights, rank 1 the tokens. A token's row of the embedding is a product
with its one-hot; keys and values stay shared; weights are opened anew for each product, as CrypTen does. Logits of the last token
are revealed, which CrypTen does to both. CrypTen's inv_sqrt is right from about 0.1 to 200 (its first guess is), and the models'
variances are 0.002 to 200: each norm's input is multiplied by a public power of two first, which sends nothing.

With --quadratic softmax and ReLU are MPCFormer's functions (see quadratic.py), which was built on CrypTen. Roots are divided by 16,
which changes no probability and costs nothing: CrypTen's reciprocal is right below some 600.

The file of weights and tokens is `make.py export`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import crypten
import crypten.communicator
import numpy as np
import torch
from crypten.config import cfg
from crypten.mpc.context import run_multiprocess

sys.path.append(str(Path(__file__).parent.parent / "soal_crypten"))
from peer import Cost, Layer, Meter, Shape, Weights, machine, positive, progress, quiet, share, typical, watch_triples

_MASKED = -200.0  # as in peer.py
_SHIFT, _ROOT_SCALE = 5.0, 16.0


@dataclass
class OptLayer(Layer):
    """OPT's norms, whose inputs are multiplied by `scales`, and feed-forward part."""

    scales: dict[str, float]

    def _norm(self, name: str, x: Any) -> Any:
        return super()._norm(name, x * self.scales[name])

    def _ffn(self, h: Any) -> Any:
        with self.meter.part("activation"):
            return h.relu()


@dataclass
class CachedLayer(OptLayer):
    """A layer whose attention takes the keys and values [heads, rows, head] of earlier tokens too, and adds its own."""

    keys: Any
    values: Any

    def _attention(self, qkv: Any) -> Any:
        shape, tokens = self.shape, qkv.size(0)
        q, k, v = (self._heads(part) for part in qkv.split(shape.qkv, dim=-1))
        self.keys, self.values = crypten.cat([self.keys, k], dim=1), crypten.cat([self.values, v], dim=1)
        length = self.keys.size(1)
        seen = torch.ones(tokens, length).tril(length - tokens)
        scores = q.div(shape.head**0.5).matmul(self.keys.transpose(1, 2))
        with self.meter.part("softmax"):
            probabilities = self._probabilities(scores, seen)
        return probabilities.matmul(self.values).transpose(0, 1).reshape(tokens, shape.width)

    def _probabilities(self, scores: Any, seen: torch.Tensor) -> Any:
        """Scores [heads, tokens, rows] to weights of the rows that a token may see, `seen` being 1 there and 0 elsewhere."""
        return (scores + (1 - seen) * _MASKED).softmax(-1)


@dataclass
class QuadraticLayer(CachedLayer):
    """The same with MPCFormer's functions."""

    def _probabilities(self, scores: Any, seen: torch.Tensor) -> Any:
        squares = ((scores + _SHIFT).div(_ROOT_SCALE) * seen).square()
        return squares * squares.sum(-1, keepdim=True).reciprocal()

    def _ffn(self, h: Any) -> Any:
        with self.meter.part("activation"):
            return (h.square() + h * 2 + 4).div(8)


@dataclass
class Model:
    """The decoder on shares: ids in, logits of the last token out."""

    shape: Shape
    weights: Weights
    layers: list[CachedLayer]
    final: OptLayer
    length: int
    meter: Meter

    def __call__(self, one_hot: np.ndarray) -> np.ndarray:
        """Tokens [n, vocabulary], rank 1's, after those before -> logits [vocabulary]."""
        with self.meter.part("pass"):
            table, n = self.weights["embed.table"], len(one_hot)
            x = share(one_hot, 1).matmul(table) + self.weights["embed.positions"][self.length : self.length + n]
            for layer in self.layers:
                x = layer(x)
            logits = self.final._norm("final.norm", x[n - 1 :]).matmul(table.t())
            opened = logits.reveal().numpy() / logits.encoder.scale
        self.length += n
        return opened[0]


def model(kind: type[CachedLayer], shape: Shape, secret: Weights, scales: np.ndarray, meter: Meter) -> Model:
    """The decoder of such layers after its public prefix, whose keys and values the owner computed ahead."""
    *pairs, last = np.split(scales, range(2, len(scales), 2))
    layers = []
    for i, pair in enumerate(pairs):
        start = f"layers.{i}."
        own = {name.removeprefix(start): value for name, value in secret.items() if name.startswith(start)}
        of = dict(zip(("attention_norm", "ffn_norm"), pair.tolist(), strict=True))
        layers.append(kind(shape, own, meter, of, secret[f"cache.{i}.keys"], secret[f"cache.{i}.values"]))
    final = OptLayer(shape, secret, meter, {"final.norm": float(last[0])})
    return Model(shape, secret, layers, final, secret["cache.0.keys"].size(1), meter)


def run_party(path: str, kind: type[CachedLayer], repeats: int) -> dict[str, Any]:
    """One process: share, generate `repeats` times along the same tokens, hold the logits against those of plaintext."""
    torch.set_num_threads(1)  # one core a party
    cfg.communicator.verbose = True  # CrypTen counts only then
    rank = crypten.communicator.get().get_rank()
    with np.load(path) as file:
        given = dict(file)
    tokens, want, scales = (given.pop(name) for name in ("tokens", "logits", "norm_scales"))
    prompt, heads = (int(given.pop(name)) for name in ("prompt", "heads"))
    vocabulary, width = given["embed.table"].shape
    shape = Shape(width, heads, heads, given["layers.0.up.kernel"].shape[1], rope=False)
    one_hot = np.eye(vocabulary, dtype=np.float32)[tokens]
    triples = watch_triples()
    tell = progress("CrypTen") if rank == 0 else quiet
    found: dict[str, list[Cost]] = {}
    with crypten.no_grad():
        secret = {name: share(array, 0) for name, array in given.items()}
        model(kind, shape, secret, scales, Meter(triples, quiet))(one_hot[:2])  # warms up
        for i in range(repeats):
            meter, passes, logits = Meter(triples, quiet), [], []
            decoder = model(kind, shape, secret, scales, meter)
            for part in np.split(one_hot, range(prompt, len(tokens))):
                crypten.communicator.get().barrier()
                logits.append(decoder(part))
                tell(f"generation {i + 1} of {repeats}, pass of {len(part)} tokens: {meter.parts['pass'].seconds:.2f} s")
                passes.append(meter.parts)
                meter.parts = {}
            for name in passes[0]:
                found.setdefault(f"prompt {name}", []).append(passes[0][name])
                found.setdefault(f"token {name}", []).append(mean([parts[name] for parts in passes[1:]]))
    error = np.abs(np.stack(logits) - want)
    return {
        "parts": {name: asdict(typical(costs)) for name, costs in found.items()},
        "accuracy": {
            "max_logit_error": float(error.max()),
            "max_logit": float(np.abs(want).max()),
            "top1_agreement": float(np.mean(np.argmax(logits, -1) == want.argmax(-1))),
        },
    }


def mean(costs: list[Cost]) -> Cost:
    """The mean of each figure."""
    return Cost(**{key: sum(getattr(cost, key) for cost in costs) / len(costs) for key in asdict(Cost())})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure a whole OPT decoder on CrypTen 0.4.1, two local processes.",
        epilog="example: crypten_model.py results/comet_peers/model.npz --repeats 3 --out results/comet_peers/crypten.json",
    )
    parser.add_argument("model", type=Path, help="weights and tokens, made by make.py export")
    parser.add_argument("--quadratic", action="store_true", help="MPCFormer's functions instead of softmax and ReLU")
    parser.add_argument("--repeats", type=positive, default=3, help="generations; times are their medians (default: 3)")
    parser.add_argument("--out", type=Path, required=True, help="write the figures there as JSON")
    args = parser.parse_args()
    load, kind = os.getloadavg(), QuadraticLayer if args.quadratic else CachedLayer
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parties = run_multiprocess(world_size=2)(run_party)(str(args.model), kind, args.repeats)
    if parties is None:
        sys.exit("CrypTen: a party failed, see above")
    facts = {"peer": f"CrypTen {crypten.__version__}", "repeats": args.repeats, "machine": machine(load)}
    args.out.write_text(json.dumps(facts | parties[0], indent=1) + "\n")


if __name__ == "__main__":
    main()
