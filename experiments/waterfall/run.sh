#!/bin/sh
# What each step of a decoder layer sends for one token, 64 positions cached: the plugin and stock SPU, GPT-2-small and SmolLM2 shapes.
# Run from the repository's root; takes half a minute. `run.sh FILE` writes elsewhere.
set -eu
out=${1:-experiments/waterfall/result.json}
{
    printf '{"gpt2": '
    spu-llm bench layer --ops plugin --steps --json
    printf ', "smollm2": '
    spu-llm bench layer --ops plugin --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536 --steps --json
    printf '}\n'
} >"$out.part"
mv "$out.part" "$out"
