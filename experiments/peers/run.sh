#!/bin/sh
# The peers of the package on one model, kjv (a GPT-2 of 3 million parameters), one prompt and four new tokens: transformers' Flax
# model on stock SPU as SecretFlow's examples use it, on three protocols and with two settings of exp, the same model enabled by the
# plugin, CrypTen 0.4.1, and our own decoders, stock and plugin. Then SmolLM2-135M by FlaxLlama, one token in the 128-bit ring, which
# takes 16 GB of memory. Run from the repository's root; takes one core for some 25 minutes, most of them CHEETAH's. CrypTen gets an
# environment of 5 GB, that of experiments/soal_crypten. To leave out: PROTOCOLS="SEMI2K ABY3" CHEETAH, EXPS=PADE SPU's default
# exp, ENABLED= the enabled model, CRYPTEN= CrypTen, SMOLLM2= SmolLM2. Finished parts are not measured again: remove results/peers
# when the package has changed.
set -eu
. experiments/made.sh
here=experiments/peers
out=${OUT:-results/peers}
python=${PYTHON:-.venv/bin/python}
venv=results/soal_crypten/venv
mkdir -p "$out"
example() { # NAME OPTIONS: a run of examples.py
    name=$1
    shift
    made "$out/example_$name.json" "$python" $here/examples.py "$@" --out "$out/example_$name.json"
}
$python -m spu_llm run $here/own.yaml --out "$out/own_plugin" --quiet
[ -z "${ENABLED-1}" ] || example enabled --enable
for protocol in ${PROTOCOLS-SEMI2K ABY3 CHEETAH}; do
    $python -m spu_llm run $here/own.yaml --set ops=stock --set protocol.name="$protocol" --out "$out/own_$protocol" --quiet
    for exp in ${EXPS-PADE DEFAULT}; do
        example "${protocol}_$exp" --protocol "$protocol" --exp "$exp"
    done
done
if [ -n "${CRYPTEN-1}" ]; then
    experiments/soal_crypten/peer_env.sh "$venv"
    made "$out/model.npz" "$python" $here/export.py "$out/model.npz"
    made "$out/crypten.json" "$venv/bin/python" $here/crypten_gpt2.py "$out/model.npz" --out "$out/crypten.json"
fi
if [ -n "${SMOLLM2-1}" ]; then
    example smollm2 --model smollm2 --prompt "The capital of France is" --tokens 1 --ring FM128
fi
$python $here/summary.py "$out" "${SUMMARY:-$here}"
