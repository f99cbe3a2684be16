#!/bin/sh
# The middle layer of the ReLU model, dense and sparse, on the plugin and on stock SPU's three protocols: halves, linear and nonlinear
# parts, the predictor; and taking active blocks by disclosed places against secret gathers. Run from the repository's root on an idle
# machine; takes two cores for some 20 minutes, most of them CHEETAH's. Finished parts are not measured again. TOKENS, CHEETAH_TOKENS and REPEATS make it smaller; what follows is given to
# every command: run.sh --model mine.yaml --comet mine.safetensors
set -eu
. experiments/made.sh
here=experiments/comet_layer
out=${OUT:-results/comet_layer}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
for stack in "plugin SEMI2K" "stock SEMI2K" "stock ABY3" "stock CHEETAH"; do
    ops=${stack% *}
    protocol=${stack#* }
    tokens=${TOKENS:-1,9,64}
    [ "$protocol" = CHEETAH ] && tokens=${CHEETAH_TOKENS:-1,9}
    measure="$python -m spu_llm bench sparse --ops $ops --protocol $protocol --repeats ${REPEATS:-5} --quiet --json"
    # shellcheck disable=SC2086
    saved "$out/layer_${ops}_$protocol.json" $measure --tokens "$tokens" "$@"
    # shellcheck disable=SC2086
    saved "$out/indexing_${ops}_$protocol.json" $measure --indexing "$@"
done
$python $here/summary.py "$out" "${SUMMARY:-$here}"
