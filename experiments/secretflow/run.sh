#!/bin/sh
# SecretFlow: SmolLM2-135M on an SPU device in production mode (three processes), its first six layers with material shared whole by
# SecretFlow and on Ray, and spu_llm.enable of an unmodified FlaxGPT2. Run from the repository's root after `make setup` and
# `make .venv-ray/installed`; takes about 20 minutes and 13 GB of memory.
set -eu
here=experiments/secretflow
out=results/secretflow
tokens=4
layers=6
export JAX_ENABLE_X64=1
mkdir -p $out

parties() { # SCRIPT OPTIONS: one process a party, until all have ended
    script=$1
    shift
    .venv/bin/python $here/"$script" --party alice "$@" &
    alice=$!
    .venv/bin/python $here/"$script" --party bob "$@" &
    bob=$!
    .venv/bin/python $here/"$script" --party carol "$@"
    wait $alice
    wait $bob
}

parties generate.py --tokens $tokens --out $out/production
parties generate.py --tokens $tokens --layers $layers --out $out/cut
parties generate.py --tokens $tokens --layers $layers --delivery shares --out $out/shares
parties enable.py --out $out/enable
.venv-ray/bin/python $here/on_ray.py --tokens $tokens --layers $layers --out $out/ray
JAX_ENABLE_X64=0 .venv/bin/python $here/summary.py $out $tokens $layers $here/result.json
