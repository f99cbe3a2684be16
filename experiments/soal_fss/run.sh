#!/bin/sh
# Counts what the dealer sends for GPT-2 small over prompts of 64 to 1024 tokens. Run from the repository's root; takes a minute.
set -eu
spu-llm bench keys --shape gpt2-small --tokens 64 --tokens 128 --tokens 256 --tokens 512 --tokens 1024 --layers 12 --quiet --json \
    >experiments/soal_fss/result.json
