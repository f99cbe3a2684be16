#!/bin/sh
# Makes the pairs of target and draft that experiments/post_* use, and measures how alignment changes what is accepted. Run from
# the repository's root; takes 2 cores and 4 GB. What was made is not made again, and a run that broke off goes on where it was;
# remove results/post_models to begin anew. Arguments choose pairs: kjv, tuned, small (all by default).
set -eu
. experiments/made.sh
here=experiments/post_models
out=results/post_models
python=${PYTHON:-.venv/bin/python}
align="$python -m spu_llm align"
make="$python $here/make.py"

$make texts --out "$out"
for pair in ${*:-kjv tuned small}; do
    case $pair in
    kjv) # a GPT-2 of 3 million parameters on King James, its draft of half a million on general English, then aligned
        made "$out/kjv-draft-unaligned.json" $make kjv --out "$out"
        made "$out/kjv-aligned/report.json" $align --target $here/kjv.yaml --draft $here/kjv-draft-unaligned.yaml \
            --text "$out/texts/public.txt" --out "$out/kjv-aligned" --top-k full --steps 300 --batch 2 --length 576 --rate 3e-3
        $make ship --out "$out"
        ;;
    tuned) # SmolLM2 as an owner tuned it on King James; the draft is the public SmolLM2, then aligned
        made "$out/smollm2-tuned.json" $make tuned --out "$out"
        made "$out/smollm2-tuned-aligned/report.json" $align --target smollm2-tuned --draft smollm2 \
            --text "$out/texts/public.txt" --out "$out/smollm2-tuned-aligned" --top-k 64 --steps 12 --rate 2e-4 --held-out 1024
        ;;
    small) # SmolLM2 itself; the draft is a Llama of two of its layers, distilled from it
        made "$out/smollm2-small-undistilled/config.json" $make small --out "$out"
        made "$out/smollm2-small/report.json" $align --target smollm2 --draft $here/smollm2-small-undistilled.yaml \
            --text "$out/texts/brown.txt" --out "$out/smollm2-small" --top-k 64 --steps 80 --learn 20000 --held-out 1024 \
            --rate 5e-4 --keep-table
        ;;
    *)
        echo "error: no pair $pair; known: kjv, tuned, small" >&2
        exit 2
        ;;
    esac
done
[ $# -gt 0 ] || made speed.json $make speed --out "$out"
$make collect --out "$out"
