#!/bin/bash
# A run on all workers of a TPU VM:   launch/tpu_vm.sh TPU_NAME ZONE my.yml run_dir=gs://my-bucket/my-run
# Everything after the zone goes to `maxbatch train`; relative paths are relative to the workers' home folders. A worker
# without maxbatch installs it from ~/maxbatch, with a Python of its own: the stock image has 3.10 (docs/launching.md).
set -eu
if [ "$#" -lt 2 ]; then
    echo "usage: $0 TPU_NAME ZONE [CONFIG.yml] [key=value ...]" >&2
    exit 2
fi
name=$1 zone=$2
shift 2

arguments=$(printf ' %q' "$@")
[ "$#" -gt 0 ] || arguments=""
venv="\$HOME/.maxbatch" home="\$HOME"
install="command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh; \
uv venv --quiet --python 3.12 $venv && \
uv pip install --quiet --python $venv/bin/python $home/maxbatch[tpu,gcs,s3,text,parquet]"
# Exit code 75: stopped on request after saving. All workers stop together, and each starts the command again.
remote="PATH=\$PATH:$venv/bin:$home/.local/bin; command -v maxbatch > /dev/null || { $install; } || exit 1; \
until maxbatch train$arguments; do code=\$?; [ \$code -eq 75 ] || exit \$code; done"

exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="bash -lc $(printf '%q' "$remote")"
