#!/usr/bin/env bash
# Gathers the wheels that scripts/bench/gpu.sh needs on a machine without network, for Python 3.12 on x86-64 Linux, in the
# versions of constraints.txt. torch and what it brings (numpy, jinja2, ...) is the GPU machine's own.
#   scripts/bench/gather_wheels.sh <dir>    then there: WHEELS=<dir> scripts/bench/gpu.sh
#   PYTHON=<path>   interpreter with pip (python3); TARGET_PYTHON=3.12; PLATFORM=x86_64
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

PYTHON=${PYTHON:-python3}
TARGET_PYTHON=${TARGET_PYTHON:-3.12}
PLATFORM=${PLATFORM:-x86_64}
if (($# != 1)); then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)

# What megads and DeepSpeed import, and what that imports.
wheels=(
    annotated-types einops hjson hydra-core iniconfig markdown-it-py mdurl msgpack omegaconf packaging pluggy psutil
    py-cpuinfo pydantic pydantic_core Pygments pytest PyYAML rich safetensors tokenizers tqdm typing_extensions
    typing-inspection xxhash zstandard
)
# On the package index as sources only; pure Python once built.
sources=(antlr4-python3-runtime deepspeed)

pinned() {
    grep -iE "^${1//[-_]/[-_]}==" "$root/constraints.txt" || {
        echo "gather_wheels.sh: constraints.txt does not pin $1" >&2
        exit 1
    }
}

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_$PLATFORM")
done
requirements=()
for name in "${wheels[@]}"; do requirements+=("$(pinned "$name")"); done
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$TARGET_PYTHON" \
    "${platforms[@]}" --dest "$folder" "${requirements[@]}"
requirements=()
for name in "${sources[@]}"; do requirements+=("$(pinned "$name")"); done
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "${requirements[@]}"

for built in "$folder"/{antlr4_python3_runtime,deepspeed}-*.whl; do
    case $built in
    *-py3-none-any.whl) ;;
    *) echo "gather_wheels.sh: $built is for this machine alone" >&2 && exit 1 ;;
    esac
done
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), in $folder"
