#!/bin/sh
# What the secure run costs in quality on SmolLM2-135M: held-out Brown and King James text and sentences of Winogrande, against
# plaintext float32. Run from the repository's root; takes about an hour. A run that broke off goes on where it was.
set -eu
here=experiments/soal_quality
spu-llm bench quality --text "$here/brown.txt" --text "$here/king_james.txt" --questions "$here/winogrande.jsonl" \
    --tokens 6000 --words 100 --choices 100 --ask 200 --out "$here/result.json"
