#!/bin/sh
# The owner's offline step for SmolLM2-135M, everything measured anew: what each prefix leaves of the activations' outliers on
# the calibration text and over the whole vocabulary, and what can stand for softmax's maximum. Run from the repository's root.
set -eu
here=experiments/soal_prefix
mkdir -p results/soal_prefix
spu-llm prepare soal --model smollm2 --fresh --out results/soal_prefix/smollm2.soal --report "$here/result.json" \
    --report "$here/plot.png"
