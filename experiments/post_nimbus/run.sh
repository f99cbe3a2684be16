#!/bin/sh
# A linear layer on encrypted weights (Nimbus's outer product) against CHEETAH's own products. Run from the repository's root; takes
# minutes and 2 GB of memory. seal-python (MIT; wheels for Python 3.8 to 3.14) goes to a folder of its own: nothing else here needs it.
set -eu
here=experiments/post_nimbus
out=results/post_nimbus
mkdir -p "$out"
[ -d "$out/seal" ] || python -m pip install --quiet --no-deps --target "$out/seal" seal-python==4.4.0
PYTHONPATH="$out/seal" python "$here/outer_product.py" --out "$here/result.json"
