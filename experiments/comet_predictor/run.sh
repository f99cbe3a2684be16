#!/bin/sh
# How well blocks and heads of the ReLU model are predicted, and what computing only these costs in quality. Run from the repository's
# root; takes 2 cores and 3 GB. Makes the prepared file that is committed (configs/comet/kjv-relu.safetensors) if it is not there;
# finished layers and measurements are kept, so a run that broke off goes on where it was.
set -eu
here=experiments/comet_predictor
texts=results/post_models/texts
prepared=configs/comet/kjv-relu.safetensors
python=${PYTHON:-.venv/bin/python}

$python experiments/post_models/make.py texts --out results/post_models
[ -e "$prepared" ] || $python -m spu_llm prepare comet --model kjv-relu --text "$texts/public.txt" --blocks 128 --rank 64 --out "$prepared"
$python $here/sweep.py --model kjv-relu --prepared "$prepared" --text "$texts/public.txt" --held-out "$texts/held_out.txt" \
    --kept results/comet_predictor --out $here
