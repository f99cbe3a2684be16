#!/bin/sh
# Makes kjv-relu, the ReLU model of Comet's experiments: trained on King James so that most hidden units of a token are 0, and each
# of some token not, in two parts (narrow, sparse). Beside it the same model without a penalty, for what that costs. Run from the
# repository's root; takes 2 cores, 2 GB and an hour and a half. A run that broke off goes on where it was; remove results/comet_models to begin anew. An argument chooses one part.
set -eu
here=experiments/comet_models
out=results/comet_models
python=${PYTHON:-.venv/bin/python}

$python experiments/post_models/make.py texts --out results/post_models
for part in ${*:-narrow sparse ship dense measure}; do
    $python $here/make.py "$part" --texts results/post_models/texts --out "$out"
done
