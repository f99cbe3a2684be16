"""One party of three in SecretFlow's production mode: alice has tokens, bob weights, and carol, no party of the SPU, deals.

JAX_ENABLE_X64=1 python secretflow_party.py NAME PORT CHECKPOINT OUT

On one device functions of a user's own, and then the text of secretflow_generation_party.py: starting SecretFlow takes long.
"""

import sys

import jax
import numpy as np
import secretflow as sf
import transformers
from secretflow_generation_party import PARTIES, make_device, run_generation

import spu_llm
from spu_llm.secretflow import SecretFlowDealer


def main(name: str, port: int, folder: str, out: str) -> None:
    cluster = {"parties": {each: {"address": f"127.0.0.1:{port + i}"} for i, each in enumerate(PARTIES)}, "self_party": name}
    sf.init(address=None, cluster_config=cluster, ray_mode=False, cross_silo_comm_backend="grpc", logging_level="error")
    device = make_device(port)
    run_functions(name, device)
    run_generation(device, folder, out)
    sf.shutdown()


def run_functions(name: str, device: sf.SPU) -> None:
    alice, bob, carol = map(sf.PYU, PARTIES)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.FlaxGPT2LMHeadModel(config, seed=0)
    ids = np.asarray([[3, 1, 4, 1, 5]], np.int32)
    mask = np.asarray([[0, 1, 1, 1, 1]], np.int32)

    def forward(ids, params):
        return model(ids, attention_mask=mask, params=params).logits

    # Whoever has weights and samples calibrates; here all parties make the same model, so each has the ranges.
    function = spu_llm.enable(forward, ranges=spu_llm.calibrate(forward, (ids, model.params)))
    params = model.params
    material = carol(lambda: function.deal(ids, params))().to(device)
    logits = device(function.program)(material, alice(lambda: ids)().to(device), bob(lambda: params)().to(device))
    error = np.abs(sf.reveal(logits) - np.asarray(forward(ids, params)))[0, 1:].max()
    print(f"{name}: error {error:.2g}")
    assert error < 2e-3

    # Each party makes its share of the material from a key; twice, since no material may serve twice.
    x = np.linspace(-4, 4, 15, dtype=np.float32).reshape(3, 5)
    gelu, dealer, shared = spu_llm.enable(jax.nn.gelu), SecretFlowDealer(device, carol), alice(lambda: x)().to(device)
    for _ in range(2):
        found = sf.reveal(device(gelu.program)(dealer.material(gelu, x), shared))
        assert np.abs(found - np.asarray(jax.nn.gelu(x))).max() < 2e-3


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
