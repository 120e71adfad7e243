#!/usr/bin/env bash
# BLOOM: 176 billion parameters on 48 nodes of 8 GPUs, tensor 4 x pipeline 12 x data 8 = 384 ranks, in jobs of 20 hours.
# scripts/slurm/examples/bloom_176b.sh data.train='[{path: /data/roots}]' [--dry-run] [more options and overrides]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../submit.sh" --chain=120 \
    --job-name=bloom-176b --nodes=48 --gpus-per-node=8 --exclusive --time=20:00:00 --signal=B:USR1@900 \
    experiment=bloom_176b run.id=bloom-176b "$@"
