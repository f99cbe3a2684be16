#!/bin/sh
# Tournament, league and CutMax on logits alone: levels, bootstraps, operations and resolved gap by vocabulary on the simulator, then
# each once encrypted by OpenFHE at toy rings (NOT SECURE). Run from the repository's root; takes one core for some 15 minutes.
# Finished parts are not measured again. CASES and VOCABULARIES, lists that may be empty, make it smaller.
set -eu
here=experiments/arhe_argmax
out=${OUT:-results/arhe_argmax}
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1
for case in ${CASES-11:64 11:512 12:512}; do
    ring=${case%:*}
    vocabulary=${case#*:}
    [ -f "$out/encrypt_${ring}_$vocabulary.json" ] ||
        $python $here/measure.py encrypt --log-ring "$ring" --vocabulary "$vocabulary" --out "$out"
done
for vocabulary in ${VOCABULARIES-32 64 2048 50257}; do
    [ -f "$out/resolve_$vocabulary.json" ] || $python $here/measure.py resolve --vocabulary "$vocabulary" --out "$out"
done
$python $here/measure.py join --from "$out" --out "${SUMMARY:-$here}"
