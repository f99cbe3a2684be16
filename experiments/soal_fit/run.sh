#!/bin/sh
# The narrowed functions beside SPU's own and SOAL's, on three protocols. Run from the repository's root; about 10 minutes.
# Coefficients themselves come from `python -m spu_llm.primitives.narrow.fit`.
set -eu
python experiments/soal_fit/measure.py
