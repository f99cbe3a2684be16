#!/bin/sh
# Attacks on the masks that a sparse run of the ReLU model reveals, for every count of active blocks, renewal of the shuffle, with
# and without heads. Text that the predictors learned from is the observer's public text, text that nobody has seen is the victims'.
# Run from the repository's root; takes one core.
set -eu
here=experiments/comet_leakage
texts=results/post_models/texts
python=${PYTHON:-.venv/bin/python}
[ -e "$texts/held_out.txt" ] || $python experiments/post_models/make.py texts --out results/post_models
$python -m spu_llm bench sparsity-leakage --comet configs/comet/kjv-relu.safetensors --model kjv-relu \
    --text "$texts/public.txt" --victims "$texts/held_out.txt" --json >"$here/result.json"
$python $here/summary.py $here
