#!/bin/sh
# shakespeare-tiny decodes encrypted at a toy ring (NOT SECURE), and on the simulator from many prompts. Run from the repository's
# root; takes one core, 2 GB and about a quarter of an hour. An argument chooses one part.
set -eu
export OMP_NUM_THREADS=1
for part in ${*:-timed errors prompts cutmax report}; do
    ${PYTHON:-.venv/bin/python} experiments/arhe_run/make.py "$part" --out results/arhe_run
done
