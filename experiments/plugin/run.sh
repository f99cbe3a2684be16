#!/bin/sh
# Measures the plugin: SmolLM2-135M against stock SPU in FM128, layers at three contexts, single operations, and next tokens
# over Brown text. Run from the repository's root; takes about 30 minutes.
set -eu
here=experiments/plugin
out=${OUT:-results/plugin}
spu-llm run configs/experiment/smollm2_plugin.yaml --out "$out" --quiet
cp "$out"/metrics.json "$here/smollm2.json"
for context in 64 512 1024; do
    spu-llm bench layer --ops plugin --context $context --json >"$here/layer_gpt2_$context.json"
    spu-llm bench layer --ops plugin --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536 --context $context --json \
        >"$here/layer_smollm2_$context.json"
done
python experiments/side_by_side.py "$here/layers.json" "$here"/layer_*.json
spu-llm bench op --op all --json >"$here/ops.json"
spu-llm bench accuracy --text "$here/brown.txt" --positions 200 --json >"$here/accuracy.json"
