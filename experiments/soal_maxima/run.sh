#!/bin/sh
# Measures what a softmax reference costs in a SmolLM2-shaped layer over 64 tokens: the score of position 0, the learned prediction,
# the conformant maximum. Run from the repository's root; takes two minutes.
set -eu
for reference in sink learned maxima; do
    spu-llm bench prompt --shape smollm2 --tokens 64 --reference "$reference" --quiet --json >"experiments/soal_maxima/$reference.json"
done
