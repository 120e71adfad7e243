#!/usr/bin/env bash
# For whatever machine with a GPU comes by, without network: versions, megads' CUDA kernels (compiled, held to fp64,
# timed beside a copy, torch eager and torch.compile), the GPU tests, and the speed of a real bf16 training of a 125M
# model over NCCL: on one GPU, with and without those kernels, then in every layout below that its GPUs have room for,
# whose first loss must be that of one GPU. Appends a line a kernel and a training to bench.jsonl; the kernels' table is
# printed once more at the end.
#   scripts/bench/gpu.sh [key=value ...]    overrides go to `megads train`, for example train.seq_len=1024
#   scripts/bench/gpu.sh --check            all of it that a CPU can do: imports, kernels, data, config; starts nothing
#   WHEELS=<dir>    installs the wheels of this folder first, into a folder of their own; gather_wheels.sh fills it
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

echo "== kernels"
failed=0
kernels=("$PYTHON" -m scripts.bench.gpu_kernels)
if ((check)); then
    "${kernels[@]}" --device cpu --dtype fp32 --rounds 1 --no-compile
else
    # With them nothing else depends on it: a kernel that is wrong here is said, and the rest goes on with torch's.
    "$PYTHON" -m megads.ops.build_cuda | tail -n 1
    "${kernels[@]}" --append "$BENCH" | tee "$WORK/kernels.txt" || failed=1
fi

echo "== data"
"$PYTHON" scripts/bench/synthetic_dataset.py --output "$WORK/synthetic" --tokens "$((check ? 100000 : 8000000))" \
    --vocab-size 50257

layouts=(
    "1 ops.impl=fused"
    "2 parallel.dp=2"
    "2 parallel.dp=2 parallel.bucket_elements=1000000000" # nothing overlaps: what overlap is worth
    "2 parallel.dp=2 parallel.zero_stage=0"
    "2 parallel.dp=2 parallel.zero_stage=2"
    "2 parallel.dp=2 parallel.zero_stage=3"
    "2 parallel.tp=2"
    "2 parallel.tp=2 parallel.sequence_parallel=true"
    "2 parallel.cp=2"
    "2 parallel.pp=2"
    "2 parallel.pp=2 parallel.recompute=full"
    "2 parallel.pp=2 parallel.schedule=interleaved"
    "2 parallel.pp=2 parallel.schedule=zb_h1"
    "2 parallel.pp=2 parallel.schedule=zb_v"
    "2 parallel.pp=2 parallel.schedule=dualpipe_v"
    "4 parallel.dp=4 parallel.zero_stage=3 parallel.zero_shard_size=2"
    "8 parallel.tp=2 parallel.sequence_parallel=true parallel.pp=2 parallel.dp=2"
)
run_dir="$WORK/gpu-$(date +%Y%m%d-%H%M%S)-$$"
train=(
    "$PYTHON" -m megads.cli.main train model=gpt3_125m "data.train=[{path: $WORK/synthetic}]"
    train.precision=bf16 train.steps=40 train.seq_len=2048 train.global_batch_size=64 train.micro_batch_size=8
    optim.lr=6e-4 schedule.warmup_samples=640 evaluation.at_end=false checkpoint.load=none logging.every_steps=5 "$@"
)
if ((check)); then
    echo "== config"
    printf '%s\n' "${layouts[@]}" | "$PYTHON" -c '
import contextlib, io, sys
from megads.cli.main import run
training = sys.argv[1:]  # Hydra changes it
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()):
        code = run([*training, *line.split()[1:], "run.dry_run=true", "run.check_memory=false"])
    if code:
        sys.exit(f"gpu.sh: {line.strip()}: exit {code}")
' "${train[@]:3}"
    "${train[@]}" run.dry_run=true "run.dir=$run_dir"
    echo "gpu.sh: the check passed; on a GPU the tests and the training would follow"
    exit 0
fi

echo "== GPU tests"
"$PYTHON" -m pytest -q -m gpu tests || failed=1

echo "== training in $run_dir"
"${train[@]}" "run.dir=$run_dir"
rm -rf "$run_dir/checkpoints"
"$PYTHON" scripts/bench/training_speed.py "$run_dir" --skip 10 --append "$BENCH"

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
for layout in "${layouts[@]}"; do
    read -r needed overrides <<<"$layout"
    if ((needed > gpus)); then
        echo "== not run, $needed GPUs are needed: $overrides"
        continue
    fi
    echo "== $overrides"
    # shellcheck disable=SC2086 # overrides are words
    "${train[@]}" "run.dir=$run_dir-layout" $overrides &&
        "$PYTHON" scripts/bench/training_speed.py "$run_dir-layout" --skip 10 --append "$BENCH" --same-as "$run_dir" ||
        failed=1
    rm -rf "$run_dir-layout"
done
cat "$WORK/kernels.txt"
if ((failed)); then
    echo "gpu.sh: the training ran, but kernels, GPU tests or layouts failed (see above)" >&2
fi
exit "$failed"
