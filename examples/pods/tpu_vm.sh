#!/usr/bin/env bash
# Trains Llama 7B on all hosts of a TPU VM: ZONE=us-east5-a bash examples/pods/tpu_vm.sh NAME
#
# NAME is one of 32 chips, made before, for instance so:
#   gcloud compute tpus tpu-vm create NAME --zone=us-east5-a --accelerator-type=v5p-64 \
#       --version=v2-alpha-tpuv5
# (v5p-64: two cores each, 32 chips, eight hosts.) Run it in a fresh clone of this repository, which
# is copied to all hosts, and again after any stop: training goes on. It stays connected for the
# whole run, so start it in tmux. NFS is a share that all hosts can mount, such as Filestore.
set -euo pipefail
name=${1:?the name of a TPU VM}
zone=${ZONE:?the zone of the TPU VM}
share=${NFS:-10.0.0.2:/share}

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$zone" . "$name:meshdsl"
# meshdsl needs Python 3.11. If the image's own is older, or has no venv, uv downloads another one.
on_all_hosts 'new="import sys; sys.exit(sys.version_info < (3, 11))"
    { test -x venv/bin/pip && venv/bin/python -c "$new"; } ||
    { rm -rf venv && python3 -c "$new" && python3 -m venv venv; } ||
    { rm -rf venv && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --user uv &&
      python3 -m uv venv -q --seed --python=3.12 venv; }'
on_all_hosts "venv/bin/pip install -q -e 'meshdsl[tpu,data]'"
on_all_hosts "sudo mkdir -p /shared && (mountpoint -q /shared || sudo mount -t nfs $share /shared)"

# The same command on every host, at the same time; --coordinator=auto: JAX asks the TPU who is there.
# A spot machine has 30 s after the notice that it is taken away.
on_all_hosts 'exec venv/bin/meshdsl train \
    --coordinator=auto --join_timeout=300 \
    --model=llama_7b --batch_size=256 --length=2048 --steps=100000 \
    --data="/shared/text/*.parquet" --tokenizer=/shared/tokenizer.json --data_cache=/shared/cache \
    --mesh_shape="data:8,model:4" \
    --layout="batch:data; heads:model; d_ff:model; vocab:model; length:model?; params/embed:data; optimizer/embed:data" \
    --policy=params=float32,compute=bfloat16 --remat=dots \
    --workdir=/shared/runs/llama --checkpoint_every=500 --grace=25'
