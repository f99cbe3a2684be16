#!/bin/sh
# Measures what a softmax reference costs in a SmolLM2-shaped layer over 64 tokens: the score of position 0, the learned prediction,
# the conformant maximum. Run from the repository's root; takes two minutes.
set -eu
here=experiments/soal_maxima
for reference in sink learned maxima; do
    spu-llm bench prompt --shape smollm2 --tokens 64 --reference "$reference" --quiet --json >"$here/$reference.json"
done
python experiments/side_by_side.py "$here/result.json" "$here/sink.json" "$here/learned.json" "$here/maxima.json"
