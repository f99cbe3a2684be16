#!/bin/sh
# Make the environment in which peer.py runs: a Python 3.10 virtual environment of its own in FOLDER with requirements.txt. About
# two minutes the first time; nothing to do while requirements.txt stays as it was.   Usage: peer_env.sh FOLDER
set -eu
[ $# -eq 1 ] || { echo "usage: peer_env.sh FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
stamp=$1/installed
cmp -s "$here/requirements.txt" "$stamp" && exit 0

python=$("$here/../../requirements/find-python")
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || {
    echo "$python is not Python 3.10, which CrypTen's pins are for; install one or set PYTHON to it" >&2
    exit 2
}
echo "Installing CrypTen 0.4.1 in $1 (5 GB, about two minutes)" >&2
"$python" -m venv --clear "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
# The stamp is written last, so an interrupted installation is done again.
cp "$here/requirements.txt" "$stamp"
