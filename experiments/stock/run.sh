#!/bin/sh
# Measures stock SPU: SmolLM2-135M in both rings, and one decoder layer. Run from the repository's root; takes about 6 minutes.
set -eu
here=experiments/stock
out=${OUT:-results/stock}
spu-llm run configs/experiment/smollm2_rings.yaml --out "$out" --quiet
cp "$out"/metrics.json "$here/smollm2_rings.json"
spu-llm bench layer --json >"$here/layer_gpt2_fm64.json"
spu-llm bench layer --ring FM128 --json >"$here/layer_gpt2_fm128.json"
spu-llm bench layer --protocol ABY3 --json >"$here/layer_gpt2_aby3.json"
spu-llm bench layer --protocol CHEETAH --json >"$here/layer_gpt2_cheetah.json"
spu-llm bench layer --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536 --json >"$here/layer_smollm2_fm64.json"
python experiments/side_by_side.py "$here/layers.json" "$here"/layer_*.json
