#!/usr/bin/env bash
# Runs all GPU benchmarks on a machine without network, within nine minutes, and prints a short table last.
#   scripts/bench/gpu.sh [--stage kernels|train|peers|experts|resume|tests|plan|layouts|... ...] [key=value ...]
#   scripts/bench/gpu.sh --stage nccl       several ranks on one GPU over NCCL, within seven minutes; run it first
#   scripts/bench/gpu.sh --check            check that all stages run, on a CPU with tiny shapes (--stage nccl as well)
#   python -m scripts.bench.gpu_table bench.jsonl      print the table again
# In order of value: build time; compute-sanitizer, the tests marked gpu, killed and resumed runs; kernels against fp64, a
# copy, torch eager and apex; training steps of 1.3B, Llama-3-8B, BLOOM-1B1 and a Llama of 1B, compared with Hugging
# Face's and torchtitan's, without train.deterministic, and of samples of 65,536 tokens with and without parallel.offload; four layers of Qwen3-30B-A3B with the experts' GEMMs in one
# kernel and in a loop, against a dense model of equal active size, transformers and torchtitan; `megads calibrate`, and its predictions against measured
# steps; the GPU memory of a process; torch.compile; `megads train` over NCCL in each layout that fits the GPUs
# (key=value: overrides).
# The schedule is printed first. Items that do not fit into BUDGET_S are reported as not run. Results are appended to
# BENCH immediately; the output of each item is logged under WORK/logs.
#   BUDGET_S=540    seconds in total, including the installation of wheels (420 with --stage nccl, whose cases all fit
#                   into 1300; 3600 with --check)
#   WHEELS=<dir>    first install the wheels of this folder, into a separate folder; gather_wheels.sh fills it
#   RESULTS=<dir>   copy results here: bench.jsonl, output.txt, logs.tar.gz
#   PYTHON=<path>   interpreter (python3); BENCH=<path> file of results (bench.jsonl); WORK=<dir> (runs/bench)
set -euo pipefail
cd "$(dirname "$0")/../.."

check=0
nccl=0
for argument in "$@"; do
    [[ $argument != --help && $argument != -h ]] || exec "${PYTHON:-python3}" -m scripts.bench.gpu_stages --help
    [[ $argument != --check ]] || check=1
    [[ $argument != nccl && $argument != --stage=nccl ]] || nccl=1
done
PYTHON=${PYTHON:-python3}
WORK=${WORK:-runs/bench}
RESULTS=${RESULTS:-}
BENCH=${BENCH:-${RESULTS:+$RESULTS/}bench.jsonl}
((nccl)) && budget=420 || budget=540
((check)) && BUDGET_S=${BUDGET_S:-3600} || BUDGET_S=${BUDGET_S:-$budget}
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
# DeepSpeed's import looks for nvcc, but none of its operators are compiled here.
command -v nvcc >/dev/null || export DS_IGNORE_CUDA_DETECTION=1
# Output of a process that is killed at its time limit must not be lost in a buffer.
export PYTHONUNBUFFERED=1

if ((!check)) && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: no CUDA device found; scripts/bench/gpu.sh --check runs on a CPU" >&2
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
