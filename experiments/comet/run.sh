#!/bin/sh
# Comet end to end: the ReLU model, a prompt of 63 tokens (CHEETAH 9), dense and sparse, on the plugin and on stock SPU's three protocols, with orders
# that serve 64 tokens and with fresh ones; with drafts; what an order costs for each number of tokens it serves. Run from the
# repository's root on an idle machine; takes some 25 minutes on two cores. Finished runs are not repeated.
set -eu
here=experiments/comet
out=${OUT:-results/comet}
mkdir -p "$out"
run() { # NAME CONFIG SETTINGS...
    name=$1
    config=$2
    shift 2
    spu-llm run "configs/experiment/comet_$config.yaml" "$@" --out "$out/$name" --quiet
}
run plugin semi2k
run plugin_fresh semi2k --set sparsity.renew=token --set baseline=null
run plugin_post semi2k --set "decoding={draft_model: kjv-draft, draft_length: 4}"
run semi2k semi2k --set ops=stock
run semi2k_fresh semi2k --set ops=stock --set sparsity.renew=token --set baseline=null
run aby3 aby3
run aby3_fresh aby3 --set sparsity.renew=token --set baseline=null
run cheetah cheetah
python $here/summary.py "$out" "$here"
