#!/bin/sh
# Comet beside its peers, the ReLU model kjv-relu, a prompt of 63 tokens and four more passes of one token: CrypTen 0.4.1, stock SPU
# on three protocols, MPCFormer's quadratic functions on CrypTen and on two of these, the plugin dense and with Comet. Run from the
# repository's root on an idle machine; takes some 10 minutes on one core, 4 of them for the quadratic student, and CHEETAH's part
# more. CrypTen gets an environment of 5 GB, that of experiments/soal_crypten. Finished parts are not made
# again: remove results/comet_peers when the model has changed.
set -eu
. experiments/made.sh
here=experiments/comet_peers
out=${OUT:-results/comet_peers}
python=${PYTHON:-.venv/bin/python}
venv=results/soal_crypten/venv
texts=results/post_models/texts
mkdir -p "$out" results/soal_crypten
[ -e "$texts/held_out.txt" ] || "$python" experiments/post_models/make.py texts --out results/post_models
for renew in 64 token; do
    $python -m spu_llm run configs/experiment/comet_semi2k.yaml --set generation.new_tokens=5 --set sparsity.renew=$renew \
        --out "$out/plugin_$renew" --quiet
done
experiments/soal_crypten/peer_env.sh "$venv"
made "$out/student.json" "$python" $here/make.py distil --out "$out"
made "$out/quality.json" "$python" $here/make.py quality --out "$out"
made "$out/student.npz" "$python" $here/make.py export --out "$out"
made "$out/crypten_dense.json" "$venv/bin/python" $here/crypten_model.py "$out/model.npz" --out "$out/crypten_dense.json"
made "$out/crypten_quadratic.json" "$venv/bin/python" $here/crypten_model.py "$out/student.npz" --quadratic \
    --out "$out/crypten_quadratic.json"
for protocol in SEMI2K ABY3 CHEETAH; do
    made "$out/stock_$protocol.json" "$python" $here/make.py spu --protocol $protocol --out "$out"
done
$python $here/summary.py "$out" "${SUMMARY:-$here}"
