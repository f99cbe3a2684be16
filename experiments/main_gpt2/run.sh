#!/bin/sh
# The whole of GPT-2 small's shape (124 million weights, as transformers initialises them) by the plugin and by stock SPU, a prompt of
# 32 tokens and four new ones. Run from the repository's root; takes one core for some 10 minutes, 10 GB of memory and 6 GB of disk.
# What is finished is not done again: remove results/main_gpt2/run when the package has changed.
set -eu
here=experiments/main_gpt2
out=${OUT:-results/main_gpt2}
python=${PYTHON:-.venv/bin/python}
$python $here/make.py results/main_gpt2/model
$python -m spu_llm run $here/run.yaml --out "$out/run" --quiet
$python $here/summary.py "$out/run/metrics.json" "${SUMMARY:-$here}"
