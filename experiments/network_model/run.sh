#!/bin/sh
# Holds the cost model against emulated links: plugin and stock SPU with the parties as processes without a network, from which the
# model predicts four networks, and over each of these. Run from the repository's root, on a machine that does nothing
# else; takes about 25 minutes, most of them stock SPU waiting for two slow links. Finished runs are not repeated.
set -eu
here=experiments/network_model
out=results/network_model
layers=6
mkdir -p "$out"
[ -f "$out/cut.gguf" ] || python "$here/cut.py" "$(spu-llm fetch smollm2)" "$layers" "$out/cut.gguf"
{
    echo "name: smollm2-$layers"
    echo "path: cut.gguf"
    grep '^prefix:' configs/model/smollm2.yaml
    echo "calibration: $(pwd)/configs/calibration/brown.txt"
} >"$out/cut.yaml"
spu-llm run "$here/experiment.yaml" --set network=none --set processes=true --out "$out/bare" --quiet
for network in lan_link wan_link 100mbps_link 5gbps_link; do
    spu-llm run "$here/experiment.yaml" --set "network=$network" --out "$out/$network" --quiet
done
python "$here/compare.py" "$out" "$here/result.json"
