#!/usr/bin/env bash
# Gathers the wheels that scripts/bench/gpu.sh needs on a machine without network, for Python 3.12 on x86-64 Linux, in the
# versions of constraints.txt. torch and what it brings (jinja2, sympy, ...) and numpy are the GPU machine's own.
#   scripts/bench/gather_wheels.sh <dir>    then there: WHEELS=<dir> scripts/bench/gpu.sh
#   PYTHON=<path>   interpreter with pip (python3); TARGET_PYTHON=3.12; PLATFORM=x86_64
#   LIMIT_MIB=60    for all wheels; Hugging Face's are left out where they would not fit
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

PYTHON=${PYTHON:-python3}
TARGET_PYTHON=${TARGET_PYTHON:-3.12}
PLATFORM=${PLATFORM:-x86_64}
LIMIT_MIB=${LIMIT_MIB:-60}
if (($# != 1)); then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)

# What megads and DeepSpeed import, and what that imports; tests too.
wheels=(
    annotated-types einops hjson hydra-core iniconfig markdown-it-py mdurl msgpack omegaconf packaging pluggy psutil
    py-cpuinfo pydantic pydantic_core Pygments pytest PyYAML rich safetensors tokenizers tqdm typing_extensions
    typing-inspection xxhash zstandard
)
# The peer of training steps, and what it imports: without them its rows say that they did not run.
peer=(
    transformers annotated-doc anyio certifi click filelock fsspec h11 hf-xet httpcore2 httpx2 huggingface_hub idna
    regex shellingham sniffio truststore typer
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
download() {
    local target=$1 name requirements=()
    shift
    for name in "$@"; do requirements+=("$(pinned "$name")"); done
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "$TARGET_PYTHON" "${platforms[@]}" --dest "$target" "${requirements[@]}"
}
download "$folder" "${wheels[@]}"
requirements=()
for name in "${sources[@]}"; do requirements+=("$(pinned "$name")"); done
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "${requirements[@]}"

for built in "$folder"/{antlr4_python3_runtime,deepspeed}-*.whl; do
    case $built in
    *-py3-none-any.whl) ;;
    *) echo "gather_wheels.sh: $built is for this machine alone" >&2 && exit 1 ;;
    esac
done
kib() { du -skc "$@" | tail -n 1 | cut -f1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
download "$scratch" "${peer[@]}"
largest=$(du -k "$scratch"/*.whl | sort -rn | head -n 1 | awk '{ n = split($2, path, "/"); print path[n] ", " $1 " KiB" }')
if (($(kib "$folder"/*.whl "$scratch"/*.whl) <= LIMIT_MIB * 1024)); then
    mv "$scratch"/*.whl "$folder"
else
    echo "left out, as all would be more than $LIMIT_MIB MiB: Hugging Face's $(kib "$scratch"/*.whl) KiB ($largest)"
fi
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(kib "$folder"/*.whl) KiB, in $folder"
