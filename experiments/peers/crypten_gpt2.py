"""A whole GPT-2 on CrypTen 0.4.1, a prompt and then token by token: ../comet_peers/crypten_model.py with GPT-2's activation.

Run by the interpreter that ../soal_crypten/peer_env.sh makes, on what export.py writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import crypten
import numpy as np
from crypten.mpc.context import run_multiprocess

sys.path.append(str(Path(__file__).parent.parent / "comet_peers"))
from crypten_model import CachedLayer, Layer, machine, positive, run_party


class Gpt2Layer(CachedLayer):
    """With a cache as there; GELU is peer.py's."""

    def _ffn(self, h: Any) -> Any:
        return Layer._ffn(self, h)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure a whole GPT-2 on CrypTen 0.4.1, two local processes.",
        epilog="example: crypten_gpt2.py results/peers/model.npz --out results/peers/crypten.json",
    )
    parser.add_argument("model", type=Path, help="weights and tokens, made by export.py")
    parser.add_argument("--repeats", type=positive, default=3, help="generations; times are their medians (default: 3)")
    parser.add_argument("--out", type=Path, required=True, help="write the figures there as JSON")
    args = parser.parse_args()
    load = os.getloadavg()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parties = run_multiprocess(world_size=2)(run_party)(str(args.model), Gpt2Layer, args.repeats)
    if parties is None:
        sys.exit("CrypTen: a party failed, see above")
    with np.load(args.model) as file:
        new_tokens = len(file["logits"])
    facts = {"peer": f"CrypTen {crypten.__version__}", "new_tokens": new_tokens, "repeats": args.repeats, "machine": machine(load)}
    args.out.write_text(json.dumps(facts | parties[0], indent=1) + "\n")


if __name__ == "__main__":
    main()
