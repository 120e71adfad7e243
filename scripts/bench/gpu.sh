#!/usr/bin/env bash
# For whatever machine with a GPU comes by, without network: versions, the GPU tests, and the speed of a real bf16
# training of a 125M model on one GPU over NCCL. Appends one line to bench.jsonl.
#   scripts/bench/gpu.sh [key=value ...]    overrides go to `megads train`, for example train.seq_len=1024
#   scripts/bench/gpu.sh --check            all of it that a CPU can do: imports, data, config; starts nothing
#   WHEELS=<dir>    installs the wheels of this folder first, into a folder of their own
#   PYTHON=<path>   interpreter (python3); BENCH=<path> file of results (bench.jsonl); WORK=<dir> (runs/bench)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
WORK=${WORK:-runs/bench}
BENCH=${BENCH:-bench.jsonl}
check=0
if [[ ${1:-} == --check ]]; then
    check=1
    shift
fi
mkdir -p "$WORK"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${WHEELS:-} ]]; then
    echo "== wheels from $WHEELS"
    rm -rf "$WORK/site"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$WORK/site" "$WHEELS"/*.whl
    PYTHONPATH="$(cd "$WORK/site" && pwd):$PYTHONPATH"
fi
# DeepSpeed's import looks for nvcc; nothing of it is compiled here.
command -v nvcc >/dev/null || export DS_IGNORE_CUDA_DETECTION=1

if ((!check)) && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: no CUDA device found; scripts/bench/gpu.sh --check does what a CPU can" >&2
    exit 1
fi

echo "== versions and device"
"$PYTHON" - <<'PYTHON_CODE'
import platform

import deepspeed
import torch

import megads
import megads.train

print(f"python {platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda}),", end=" ")
print(f"deepspeed {deepspeed.__version__}, megads {megads.__version__}")
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    print(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, NCCL {torch.cuda.nccl.version()}")
PYTHON_CODE

echo "== data"
"$PYTHON" scripts/bench/synthetic_dataset.py --output "$WORK/synthetic" --tokens "$((check ? 100000 : 8000000))" \
    --vocab-size 50257

run_dir="$WORK/gpu-$(date +%Y%m%d-%H%M%S)-$$"
train=(
    "$PYTHON" -m megads.cli.main train model=gpt3_125m "run.dir=$run_dir" "data.train=[{path: $WORK/synthetic}]"
    train.precision=bf16 train.steps=40 train.seq_len=2048 train.global_batch_size=64 train.micro_batch_size=8
    optim.lr=6e-4 schedule.warmup_samples=640 evaluation.at_end=false checkpoint.load=none logging.every_steps=5 "$@"
)
if ((check)); then
    echo "== config"
    "${train[@]}" run.dry_run=true
    echo "gpu.sh: the check passed; on a GPU the tests and the training would follow"
    exit 0
fi

failed=0
echo "== GPU tests"
"$PYTHON" -m pytest -q -m gpu tests || failed=1

echo "== training in $run_dir"
"${train[@]}"
rm -rf "$run_dir/checkpoints"
"$PYTHON" scripts/bench/training_speed.py "$run_dir" --skip 10 --append "$BENCH"
if ((failed)); then
    echo "gpu.sh: the training ran, but GPU tests failed (see above)" >&2
fi
exit "$failed"
