#!/bin/sh
# What zeros cost a SwiGLU model that has none: SmolLM2-135M with the smallest hidden units of each layer set to 0, thresholds being
# fitted on Brown passages and perplexity read on other documents of Brown and on King James. Run from the repository's root; takes
# 2 cores and 3 GB for some ten minutes.
set -eu
here=experiments/comet_thresholds
python=${PYTHON:-.venv/bin/python}
$python $here/sweep.py --calibration configs/calibration/brown.txt --text experiments/soal_quality/brown.txt \
    --text experiments/soal_quality/king_james.txt --tokens "${TOKENS:-1008}" --out $here
