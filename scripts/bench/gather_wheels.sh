#!/usr/bin/env bash
# Gathers the wheels that scripts/bench/gpu.sh needs on a machine without network whose Python 3.12 has torch with CUDA,
# triton, transformers, tokenizers, safetensors, pytest and what these bring; x86-64 Linux. Versions are those of
# constraints.txt; what the machine has is used as it is.
#   scripts/bench/gather_wheels.sh <dir>    then there: WHEELS=<dir> scripts/bench/gpu.sh
#   BARE=1          for a machine with torch and NumPy alone: also what the list above leaves out
#   PYTHON=<path>   interpreter with pip (python3); TARGET_PYTHON=3.12; PLATFORM=x86_64
#   LIMIT_MIB=45    for all wheels: with the checkout (6 MiB) they must travel together; the peers are left out beyond it
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

PYTHON=${PYTHON:-python3}
TARGET_PYTHON=${TARGET_PYTHON:-3.12}
PLATFORM=${PLATFORM:-x86_64}
LIMIT_MIB=${LIMIT_MIB:-45}
if (($# != 1)); then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
if compgen -G "$folder/*.whl" >/dev/null; then
    echo "gather_wheels.sh: $folder has wheels already, and two versions of a package stop pip: take an empty folder" >&2
    exit 2
fi

# What megads, its tests and DeepSpeed import beyond that image.
wheels=(annotated-types hjson hydra-core omegaconf pydantic pydantic_core typing_extensions typing-inspection zstandard)
# On the package index as sources only; pure Python once built.
sources=(antlr4-python3-runtime deepspeed)
# torchtitan's Llama, a peer of training steps, for torch 2.11, and what it imports. Nothing else needs them, so
# constraints.txt does not have them. Without them the peer's rows say that they did not run.
peers=(
    torchtitan==0.2.2 torchdata==0.11.0 datasets==4.7.0 dill==0.4.0 multiprocess==0.70.18 tyro==1.0.17 tomli==2.5.0
    docstring-parser==0.18.0 typeguard==4.6.0
)
if [[ -n ${BARE:-} ]]; then
    wheels+=(
        einops iniconfig markdown-it-py mdurl msgpack ninja packaging pluggy psutil py-cpuinfo Pygments pytest PyYAML
        rich safetensors tokenizers tqdm xxhash
        # Hugging Face's BLOOM, the other peer.
        transformers annotated-doc anyio certifi click filelock fsspec h11 hf-xet httpcore2 httpx2 huggingface_hub idna
        regex shellingham sniffio truststore typer
    )
    peers=()
fi

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
    local target=$1
    shift
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "$TARGET_PYTHON" "${platforms[@]}" --dest "$target" "$@"
}
of_constraints() {
    local name
    requirements=()
    for name in "$@"; do requirements+=("$(pinned "$name")"); done
}
of_constraints "${wheels[@]}"
download "$folder" "${requirements[@]}"
of_constraints "${sources[@]}"
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "${requirements[@]}"

for built in "$folder"/{antlr4_python3_runtime,deepspeed}-*.whl; do
    case $built in
    *-py3-none-any.whl) ;;
    *) echo "gather_wheels.sh: $built is for this machine alone" >&2 && exit 1 ;;
    esac
done
kib() { du -skc "$@" | tail -n 1 | cut -f1; }
if ((${#peers[@]})); then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    download "$scratch" "${peers[@]}"
    if (($(kib "$folder"/*.whl "$scratch"/*.whl) <= LIMIT_MIB * 1024)); then
        mv "$scratch"/*.whl "$folder"
    else
        echo "left out, as all would be more than $LIMIT_MIB MiB: torchtitan's $(kib "$scratch"/*.whl) KiB"
    fi
fi
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(kib "$folder"/*.whl) KiB, in $folder"
(($(kib "$folder"/*.whl) <= LIMIT_MIB * 1024)) || {
    echo "gather_wheels.sh: more than LIMIT_MIB=$LIMIT_MIB" >&2
    exit 1
}
