#!/usr/bin/env bash
# Two small nodes of 4 GPUs: tensor parallelism within a node, two pipeline stages across the nodes.
# scripts/slurm/examples/two_nodes.sh data.raw='my/*.jsonl' [--dry-run] [more options and overrides]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../submit.sh" \
    --nodes=2 --gpus-per-node=4 --cpus-per-task=16 --time=04:00:00 \
    model=bloom_560m train.steps=2000 \
    parallel.tp=4 parallel.pp=2 "$@"
