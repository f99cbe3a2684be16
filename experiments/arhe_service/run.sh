#!/bin/sh
# AR-HE as two processes: sizes of keys and ciphertexts by ring; three tokens served whole, and again by a server that is killed within
# its third token and started anew. Run from the repository's root after experiments/arhe_models/run.sh; takes one core and half an hour,
# 12 GB of memory and 10 GB of disk for the keys of a secure ring, a tenth of that for the rest. What is there is not made again; remove
# results/arhe_service to begin anew. An argument chooses one part. All rings but the secure one are toys: NOT SECURE.
set -eu
. experiments/made.sh
here=experiments/arhe_service
out=${OUT:-results/arhe_service}
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-shakespeare-tiny}
prompt=${PROMPT:-My lord, }
export OMP_NUM_THREADS=1
mkdir -p "$out"
arhe() { $python -m spu_llm arhe "$@"; }
client() { # NAME OPTIONS: a client's keys and request
    name=$1
    shift
    arhe publish --model "$model" --argmax league "$@" --out "$out/$name/published"
    saved "$out/$name.keys.json" arhe keys --terms "$out/$name/published" --out "$out/$name/client" --json
    saved "$out/$name.request.json" arhe encrypt --keys "$out/$name/client" --prompt "$prompt" --tokens 3 --out "$out/$name/request" --json
}
serve() { # NAME KIND CLIENT: what a server took for a client's request, killed once or not
    [ -f "$out/$1.json" ] && return
    rm -rf "${out:?}/$1"
    $python $here/serve.py "$2" "$out/$1.json" "$out/$1" $python -m spu_llm arhe serve --terms "$out/$3/published" \
        --keys "$out/$3/client/public" --request "$out/$3/request" --model "$model" --passages 200 --out "$out/$1" --quiet --json
}
sizes() {
    for ring in 11 12 13 14; do
        client "few_$ring" --log-ring $ring --few-keys
        rm -rf "$out/few_$ring/client"
    done
    client all_12 --log-ring 12
    rm -rf "$out/all_12/client"
    client all_11 --log-ring 11
}
secure() {
    client secure --parameters secure --secure
    rm -rf "$out/secure/client"
}
costs() {
    serve whole whole all_11
    serve killed killed all_11
    for run in whole killed; do
        saved "$out/$run.answer.json" arhe decrypt --keys "$out/all_11/client" --response "$out/$run/response" --json
    done
    for file in "$out"/whole/response/*; do # the same bytes, killed or not
        cmp "$file" "$out/killed/response/${file##*/}"
    done
}
summary() {
    $python $here/summary.py "$out" "$here"
}
for part in ${*:-sizes secure costs summary}; do
    $part
done
