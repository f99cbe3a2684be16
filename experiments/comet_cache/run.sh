#!/bin/sh
# Keys and values of heads that a token skips, made at once or when a later token needs them: what each costs, by the heads that the
# ReLU model's predictors choose on held-out text. Run from the repository's root; takes a minute.
set -eu
here=experiments/comet_cache
texts=results/post_models/texts
python=${PYTHON:-.venv/bin/python}
[ -e "$texts/held_out.txt" ] || $python experiments/post_models/make.py texts --out results/post_models
$python $here/policies.py --text "$texts/held_out.txt" --out $here
