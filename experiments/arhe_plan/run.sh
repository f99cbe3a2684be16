#!/bin/sh
# Bootstraps of AR-HE's schedule: predicted by formula over context lengths, performed on the simulator, with and without each
# optimisation; and how far polynomials stray from exact functions, by layer. Run from the repository's root; takes one core for some
# five minutes and 3 GB. Finished parts are not made again. CONTEXTS, PROMPTS, SMALL and ERRORS, lists that may be empty, make it smaller.
set -eu
. experiments/made.sh
here=experiments/arhe_plan
out=${OUT:-results/arhe_plan}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
plan="$python -m spu_llm plan arhe --json"
simulate="$python -m spu_llm arhe simulate --quiet --json"
for context in ${CONTEXTS:-33 64 256 512 1024}; do
    for levels in 10 7; do
        saved "$out/plan_${levels}_cache_$context.json" $plan --context "$context" --levels $levels
        saved "$out/plan_${levels}_all_$context.json" $plan --context "$context" --levels $levels --no-cache
    done
done
for prompt in ${PROMPTS-4 16 63}; do
    for model in gpt2-tiny llama-tiny; do
        common="--model $model --log-ring 7 --tokens 2 --prompt-tokens $prompt --margin 1.5"
        saved "$out/run_${model}_7_cache_$prompt.json" $simulate $common
        saved "$out/run_${model}_7_all_$prompt.json" $simulate $common --no-cache
    done
done
for prompt in ${SMALL-33 64}; do
    saved "$out/run_gpt2-small_16_cache_$prompt.json" $simulate --model gpt2-small --tokens 2 --prompt-tokens "$prompt" --passages 6
done
for model in ${ERRORS-kjv gpt2-tiny llama-tiny}; do
    case $model in
    kjv) saved "$out/errors_kjv.json" $simulate --model kjv --prompt "And it came to pass" --tokens 8 --errors ;;
    *) saved "$out/errors_$model.json" $simulate --model "$model" --prompt-tokens 8 --tokens 8 --margin 1.5 --errors ;;
    esac
done
$python $here/summary.py "$out" "${SUMMARY:-$here}"
