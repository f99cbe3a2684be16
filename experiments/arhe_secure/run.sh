#!/bin/sh
# The first layer of shakespeare-tiny on four encrypted characters, at 128 bits of security by the standard's tables. Run from the
# repository's root; takes one core and about a quarter of an hour.
set -eu
OMP_NUM_THREADS=1 ${PYTHON:-.venv/bin/python} experiments/arhe_secure/make.py
