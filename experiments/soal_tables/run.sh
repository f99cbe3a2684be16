#!/bin/sh
# Which tables SmolLM2's measured ranges choose, and what that saves. Run from the repository's root; takes a minute or two.
# Usage: run.sh [FOLDER_OF_RESULT]
set -eu
spu-llm bench tables --model smollm2 --context 64 --quiet --json >"${1:-experiments/soal_tables}/result.json"
