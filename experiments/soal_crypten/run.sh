#!/bin/sh
# Measures a decoder layer over prompts on CrypTen, stock SPU, SOAL's generic protocols and the plugin, one after the other, and
# compares them. Run from the repository's root, on a machine that does nothing else; takes about 20 minutes. CrypTen gets an
# environment of its own in results/soal_crypten/venv (5 GB).
set -eu
here=experiments/soal_crypten
out=results/soal_crypten
mkdir -p "$out"
"$here/peer_env.sh" "$out/venv"
for shape in gpt2-small smollm2; do
    for tokens in 64 512; do
        family=${shape%-small}
        repeats=$([ "$tokens" -gt 64 ] && echo 1 || echo 3)
        "$out/venv/bin/python" "$here/peer.py" --family "$family" --tokens "$tokens" --repeats "$repeats" \
            --out "$out/$shape.$tokens.crypten.json"
        for ops in stock generic plugin; do
            spu-llm bench prompt --shape "$shape" --tokens "$tokens" --ops "$ops" --quiet --json >"$out/$shape.$tokens.$ops.json"
        done
    done
done
for tokens in 128 256; do
    for ops in stock generic plugin; do
        spu-llm bench prompt --shape gpt2-small --tokens "$tokens" --ops "$ops" --quiet --json >"$out/gpt2-small.$tokens.$ops.json"
    done
done
python "$here/compare.py" "$out" "$here"
