#!/bin/sh
# How the cost of a decoder layer grows: one new token against 64 to 1024 cached positions, and a prompt of 16 and 32 tokens, GPT-2
# small's shape and SmolLM2's, the plugin beside stock SPU in the same run; prompts of 64 tokens and more are soal_crypten's. Run from
# the repository's root; takes one core for some 5 minutes. Finished parts are not measured again: remove results/main_growth when the
# package has changed. CONTEXTS and TOKENS make it smaller (TOKENS= leaves prompts out).
set -eu
. experiments/made.sh
here=experiments/main_growth
out=${OUT:-results/main_growth}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
for shape in "gpt2-small --family gpt2 --width 768 --heads 12 --ffn 3072" \
    "smollm2 --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536"; do
    name=${shape%% *}
    for context in ${CONTEXTS-64 128 256 512 1024}; do
        # shellcheck disable=SC2086
        saved "$out/layer.$name.$context.json" "$python" -m spu_llm bench layer --ops plugin ${shape#* } --context "$context" --json
    done
    for tokens in ${TOKENS-16 32}; do
        for ops in stock plugin; do
            saved "$out/prompt.$name.$tokens.$ops.json" "$python" -m spu_llm bench prompt --shape "$name" --tokens "$tokens" \
                --ops $ops --quiet --json
        done
    done
done
[ -n "${TOKENS-16 32}" ] && others=experiments/soal_crypten/result.json
# shellcheck disable=SC2086
$python $here/summary.py "$out" "${SUMMARY:-$here}" ${others-}
