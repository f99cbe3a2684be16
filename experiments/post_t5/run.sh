#!/bin/sh
# POST with an encoder-decoder of FLAN-T5-small's shape, two layers each, random weights; stock SEMI2K. Run from the repository's
# root; takes about five minutes and 5 GB of memory.
set -eu
python experiments/post_t5/generate.py --out experiments/post_t5/result.json
