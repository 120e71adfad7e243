#!/usr/bin/env bash
# For whatever machine with a GPU comes by, without network: one command, within nine minutes, a short table last.
#   scripts/bench/gpu.sh [--stage kernels|attention|train|resume|tests|layouts|all ...] [key=value ...]
#   scripts/bench/gpu.sh --check            all stages on a CPU, with tiny shapes: does it work?
#   python -m scripts.bench.gpu_table bench.jsonl      the table again
# kernels: megads' CUDA kernels compiled, held to fp64, timed beside a copy, torch eager, torch.compile and apex.
# attention: every kind of model.attention that runs here. train: steps of 125M to 1.3B, ours and Hugging Face BLOOM's.
# resume: a killed run continues bit for bit. tests: those marked gpu. layouts: `megads train` over NCCL in each layout
# that the GPUs have room for; key=value go to it. What does not fit into BUDGET_S is said as not run; results are
# appended to BENCH as they come.
#   BUDGET_S=540    seconds for all of it, installing wheels included
#   WHEELS=<dir>    installs the wheels of this folder first, into a folder of their own; gather_wheels.sh fills it
#   PYTHON=<path>   interpreter (python3); BENCH=<path> file of results (bench.jsonl); WORK=<dir> (runs/bench)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
WORK=${WORK:-runs/bench}
BENCH=${BENCH:-bench.jsonl}
BUDGET_S=${BUDGET_S:-540}
mkdir -p "$WORK"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${WHEELS:-} ]]; then
    rm -rf "$WORK/site"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" \
        "$WHEELS"/*.whl
    site=$(cd "$WORK/site" && pwd)
    export PYTHONPATH="$site:$PYTHONPATH"
    echo "wheels of $WHEELS installed in $site"
fi
# DeepSpeed's import looks for nvcc; nothing of it is compiled here.
command -v nvcc >/dev/null || export DS_IGNORE_CUDA_DETECTION=1
# A process that a time limit ends must have said what it was doing.
export PYTHONUNBUFFERED=1

check=0
for argument in "$@"; do [[ $argument != --check ]] || check=1; done
if ((!check)) && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: no CUDA device found; scripts/bench/gpu.sh --check does what a CPU can" >&2
    exit 1
fi
exec "$PYTHON" -m scripts.bench.gpu_stages --budget-s "$BUDGET_S" --spent-s "$SECONDS" --work "$WORK" \
    --append "$BENCH" "$@"
