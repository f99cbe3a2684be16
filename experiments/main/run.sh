#!/bin/sh
# The main figure: SmolLM2-135M, prompt of 32 tokens, 32 new ones, by stock SPU and by each part of this project; and every part on one small
# model. Run from the repository's root after experiments/post_models/run.sh, on a machine that does nothing else; takes about half an
# hour of two cores and 9 GB. Finished runs are not repeated. configs/experiment/main_wan.yaml differs from main_lan.yaml in its network alone,
# so summary.py prices the same runs for wan.
set -eu
here=experiments/main
out=${OUT:-results/main}
mkdir -p "$out"
# what the owner prepares, measured on text (SOAL); tables, prefix and references then come from this file
[ -f "$out/smollm2.soal" ] || spu-llm prepare soal --model smollm2 --out "$out/smollm2.soal" --quiet
text="And it came to pass in those days, that the king of Israel gathered all the people together, and spake unto them, saying, Hear, O my"
spu-llm run configs/experiment/main_lan.yaml --out "$out/lan" --quiet \
    --set "variants.soal={soal: $out/smollm2.soal, decoding: null}" \
    --set "variants.post_tuned={model: smollm2-tuned, generation: {prompt: \"$text\"}, decoding: {draft_model: smollm2-tuned-draft, draft_length: 8}}"
cp "$out/lan/metrics.json" "$here/lan.json"
spu-llm run configs/experiment/main_small.yaml --out "$out/small" --quiet
cp "$out/small/metrics.json" "$here/small.json"
python "$here/summary.py" "$here"
