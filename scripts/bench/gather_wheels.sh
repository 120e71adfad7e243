#!/usr/bin/env bash
# Downloads the wheels that scripts/bench/gpu.sh needs on a machine without network whose Python 3.12 has torch with
# CUDA, triton, transformers, tokenizers, safetensors, pytest and their dependencies; x86-64 Linux. Versions are those
# of constraints.txt; packages that the machine already has are used as they are.
#   scripts/bench/gather_wheels.sh <dir>    then on that machine: WHEELS=<dir> scripts/bench/gpu.sh
#   BARE=1          for a machine with only torch and NumPy: also download the packages listed above
#   PYTHON=<path>   interpreter with pip (python3); TARGET_PYTHON=3.12; PLATFORM=x86_64
#   LIMIT_MIB=60    size limit of the wheels and the checkout, which are copied together; above it the peers are omitted
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

PYTHON=${PYTHON:-python3}
TARGET_PYTHON=${TARGET_PYTHON:-3.12}
PLATFORM=${PLATFORM:-x86_64}
LIMIT_MIB=${LIMIT_MIB:-60}
if (($# != 1)); then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
if compgen -G "$folder/*.whl" >/dev/null; then
    echo "gather_wheels.sh: $folder already has wheels; pip fails on two versions of a package: use an empty one" >&2
    exit 2
fi

kib() { du -skc "$@" | tail -n 1 | cut -f1; }
# Files of the checkout that are copied: those that git tracks or would track; without git, all.
if git -C "$root" rev-parse --git-dir >/dev/null 2>&1; then
    tree=$(cd "$root" && git ls-files -z --cached --others --exclude-standard | du -ck --files0-from=- | tail -n 1 | cut -f1)
else
    tree=$(kib "$root")
fi

# Imported by megads, its tests and DeepSpeed, and missing on that machine.
wheels=(annotated-types hjson hydra-core omegaconf pydantic pydantic_core typing_extensions typing-inspection zstandard)
# Only source distributions on the package index; pure Python when built.
sources=(antlr4-python3-runtime deepspeed)
# torchtitan's Llama, a peer in the training steps, for torch 2.11, and its dependencies. Nothing else needs them, so
# they are not in constraints.txt. Without them the peer's rows are reported as not run.
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
    *) echo "gather_wheels.sh: $built is not pure Python" >&2 && exit 1 ;;
    esac
done
left=$((LIMIT_MIB * 1024 - tree))
if ((${#peers[@]})); then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    download "$scratch" "${peers[@]}"
    if (($(kib "$folder"/*.whl "$scratch"/*.whl) <= left)); then
        mv "$scratch"/*.whl "$folder"
    else
        echo "omitted to stay below LIMIT_MIB=$LIMIT_MIB: torchtitan's wheels, $(kib "$scratch"/*.whl) KiB"
    fi
fi
wheels_kib=$(kib "$folder"/*.whl)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $wheels_kib KiB, in $folder; with the checkout's $tree KiB" \
    "$(((wheels_kib + tree) / 1024)) of $LIMIT_MIB MiB"
((wheels_kib <= left)) || {
    echo "gather_wheels.sh: wheels and checkout exceed LIMIT_MIB=$LIMIT_MIB" >&2
    exit 1
}
