#!/usr/bin/env bash
# Collects the wheels of megads and of all that it needs in a folder, for machines without network; `make wheelhouse`.
# Run it on a machine with network that has the Python version, processor and C library of the others.
#   scripts/wheelhouse.sh wheels        then on a compute node, with an environment active:
#   pip install --no-index --find-links wheels 'megads[report]'
#   EXTRAS=report,wandb       extras of megads (report); empty: none
#   TORCH_INDEX=<url>         takes torch from this index, such as https://download.pytorch.org/whl/cpu or .../cu126;
#                             without it torch comes from pip's index, whose build for Linux is that for CUDA
#   PYTHON=<path>             interpreter with pip (that of VENV or .venv if there is one, else python3)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if (($# != 1)); then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
if compgen -G "$folder/*.whl" >/dev/null; then
    echo "wheelhouse.sh: $folder already has wheels; pip could take an old version from it: name an empty folder" >&2
    exit 2
fi
cd "$root"
venv=${VENV:-.venv}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $venv/bin/python ]] && PYTHON=$venv/bin/python
fi
extras=${EXTRAS-report}
requirement=.${extras:+[$extras]}
# megads uses none of DeepSpeed's kernels: do not compile them.
export DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1
if [[ -n ${TORCH_INDEX:-} ]]; then
    "$PYTHON" -m pip download --quiet --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" \
        --dest "$folder" torch
fi
# The last two build megads where `make demo` installs it from a checkout.
"$PYTHON" -m pip wheel --quiet --constraint constraints.txt --find-links "$folder" --wheel-dir "$folder" \
    "$requirement" 'hatchling>=1.27,<2' editables
torch=$(cd "$folder" && echo torch-*.whl)
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sm "$folder" | cut -f1) MiB, for Python $version, with $torch"
echo "pip install --no-index --find-links $(printf %q "$folder") 'megads${extras:+[$extras]}'"
