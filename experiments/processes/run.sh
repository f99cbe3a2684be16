#!/bin/sh
# Parties as processes. Over emulated lan and wan, plugin against stock SPU, the first six layers of SmolLM2: the runs that
# experiments/network_model/run.sh made. And 200 tokens on two of its layers, watched for memory and file handles.
# Run from the repository's root after that; takes about 5 minutes more.
set -eu
here=experiments/processes
out=results/network_model
for network in lan wan; do
    cp "$out/${network}_link/metrics.json" "$here/${network}_link.json"
done
[ -f "$out/two.gguf" ] || python experiments/network_model/cut.py "$(spu-llm fetch smollm2)" 2 "$out/two.gguf"
sed 's/smollm2-6/smollm2-2/; s/cut.gguf/two.gguf/' "$out/cut.yaml" >"$out/two.yaml"
sed '/^baseline/,$d; s/cut.yaml/two.yaml/; s/network: lan/network: none/' experiments/network_model/experiment.yaml >"$out/soak.yaml"
python "$here/soak.py" "$out/soak.yaml" 200 "$here/soak.json"
