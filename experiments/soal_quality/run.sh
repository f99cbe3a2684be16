#!/bin/sh
# What the secure run costs in quality on SmolLM2-135M: held-out Brown and King James text and sentences of Winogrande, against
# plaintext float32. Run from the repository's root; takes about half an hour of one core and 6 GB, and 8 GB for the check at its
# beginning. A run that broke off goes on where it was. Small products are no faster on several cores.
set -eu
here=experiments/soal_quality
OPENBLAS_NUM_THREADS=1 spu-llm bench quality --text "$here/brown.txt" --text "$here/king_james.txt" \
    --questions "$here/winogrande.jsonl" --tokens 2000 --words 100 --choices 40 --ask 40 --out "$here/result.json"
