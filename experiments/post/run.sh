#!/bin/sh
# POST against the same decoding token by token: the tuned SmolLM2 with its aligned draft on lan and wan, drafts of 4, 8 and 16 tokens, and
# of the public SmolLM2 as it is; 500 greedy tokens of the small pair; the small pair on CHEETAH; passes by their positions; sampling
# naive and as it is done. Run from the repository's root after experiments/post_models/run.sh; takes about 70 minutes on two cores.
# Finished runs are not repeated.
set -eu
. experiments/made.sh
here=experiments/post
out=${OUT:-results/post}
mkdir -p "$out"
for network in lan wan; do
    spu-llm run "configs/experiment/post_$network.yaml" --out "$out/$network" --quiet
done
for setting in lan_4 lan_16 wan_16; do
    spu-llm run "configs/experiment/post_${setting%_*}.yaml" --set baseline=null --set "decoding.draft_length=${setting#*_}" --out "$out/$setting" --quiet
done
spu-llm run configs/experiment/post_lan.yaml --set baseline=null --set decoding.draft_model=smollm2 --out "$out/lan_unaligned" --quiet
spu-llm run configs/experiment/post_flags.yaml --out "$out/flags" --quiet
spu-llm run "$here/greedy.yaml" --out "$out/greedy" --quiet
spu-llm run "$here/cheetah.yaml" --out "$out/cheetah" --quiet
saved "$out/passes.json" spu-llm bench passes --text experiments/plugin/brown.txt --context 16 --repeats 1 --quiet --json
for vocabulary in 512 2048; do
    for ops in "plugin --protocol SEMI2K" "stock --protocol CHEETAH"; do
        # shellcheck disable=SC2086
        saved "$out/sampling_${ops%% *}_$vocabulary.json" spu-llm bench sampling --vocabulary $vocabulary --ops $ops --repeats 1 --quiet --json
    done
done
python "$here/summary.py" "$out" "$here"
