#!/bin/sh
# Makes shakespeare-tiny, the character model of AR-HE's encrypted runs: a GPT-2 of two layers that learned Shakespeare's plays.
# Run from the repository's root; takes one core, 1 GB and about ten minutes. An argument chooses one part.
set -eu
here=experiments/arhe_models
out=results/arhe_models
python=${PYTHON:-.venv/bin/python}

for part in ${*:-train ship measure}; do
    $python $here/make.py "$part" --out "$out"
done
