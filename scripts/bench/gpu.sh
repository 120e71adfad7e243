#!/usr/bin/env bash
# For whatever machine with a GPU comes by, without network: one command, within nine minutes, a short table last.
#   scripts/bench/gpu.sh [--stage kernels|attention|train|resume|tests|plan|layouts|... ...] [key=value ...]
#   scripts/bench/gpu.sh --check            all stages on a CPU, with tiny shapes: does it work?
#   python -m scripts.bench.gpu_table bench.jsonl      the table again
# In the order of their worth: the build, timed; compute-sanitizer, the tests marked gpu, killed and resumed runs, and
# what a process takes of the GPU; kernels against fp64, a copy, torch eager and apex; every kind of attention; training
# steps of 1.3B, Llama-3-8B, BLOOM-1B1 and a Llama of 1B, beside Hugging Face's and torchtitan's, and without
# train.deterministic; an ncu profile of the three slowest kernels; `megads calibrate`, and its plans beside measured
# steps; torch.compile; `megads train` over NCCL in each layout that the GPUs have room for, to which key=value go. The
# plan is printed first; what does not fit into BUDGET_S is reported as not run; results are appended to BENCH as they
# come; each item's output is in a log under WORK/logs.
#   BUDGET_S=540    seconds for all of it, installing wheels included (3600 with --check)
#   WHEELS=<dir>    installs the wheels of this folder first, into a folder of their own; gather_wheels.sh fills it
#   RESULTS=<dir>   keeps what is worth carrying home: bench.jsonl, output.txt, logs.tar.gz
#   PYTHON=<path>   interpreter (python3); BENCH=<path> file of results (bench.jsonl); WORK=<dir> (runs/bench)
set -euo pipefail
cd "$(dirname "$0")/../.."

check=0
for argument in "$@"; do [[ $argument != --check ]] || check=1; done
PYTHON=${PYTHON:-python3}
WORK=${WORK:-runs/bench}
RESULTS=${RESULTS:-}
BENCH=${BENCH:-${RESULTS:+$RESULTS/}bench.jsonl}
((check)) && BUDGET_S=${BUDGET_S:-3600} || BUDGET_S=${BUDGET_S:-540}
mkdir -p "$WORK" ${RESULTS:+"$RESULTS"}

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

if ((!check)) && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: no CUDA device found; scripts/bench/gpu.sh --check does what a CPU can" >&2
    exit 1
fi
stages=("$PYTHON" -m scripts.bench.gpu_stages --budget-s "$BUDGET_S" --spent-s "$SECONDS" --work "$WORK"
    --append "$BENCH" "$@")
if [[ -z $RESULTS ]]; then
    exec "${stages[@]}"
fi
code=0
"${stages[@]}" 2>&1 | tee "$RESULTS/output.txt" || code=$?
tar -czf "$RESULTS/logs.tar.gz" -C "$WORK" logs
exit "$code"
