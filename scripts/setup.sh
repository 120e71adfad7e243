#!/usr/bin/env bash
# Creates .venv with the pinned dependencies and an editable install of megads. A second call does nothing unless
# pyproject.toml or constraints.txt changed. Needs Python >= 3.11. If there is a C++ compiler, it also builds megads'
# kernels; without one PyTorch's operators are used.
#   PYTHON=/path/to/python scripts/setup.sh     selects the interpreter
#   VENV=/path/to/venv scripts/setup.sh         creates the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STAMP="$VENV/.megads-setup"

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found (tried ${PYTHON:+$PYTHON, }python3, python3.13, python3.12, python3.11, python)." \
        "Install one, or name it: PYTHON=/path/to/python3.11 make setup"
}

want=$(cat pyproject.toml constraints.txt | cksum)
if [[ -f $STAMP && $(<"$STAMP") == "$want" && -x $VENV/bin/python ]]; then
    exit 0
fi

if [[ ! -x $VENV/bin/python ]]; then
    python=$(find_python)
    echo "setup: creating $VENV with $python"
    "$python" -m venv "$VENV" || fail "'$python -m venv $VENV' failed: install the venv module (Debian: python3-venv)"
elif ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    fail "$VENV was made with a Python older than 3.11: remove it and run make setup again"
fi

# megads uses none of DeepSpeed's kernels: do not compile them.
export DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1
install() {
    "$VENV/bin/python" -m pip install --quiet --constraint constraints.txt "$@" ||
        fail "'pip install $*' failed (see above). Without network, point pip at a mirror or a wheel folder" \
            "(PIP_INDEX_URL, PIP_FIND_LINKS) and run make setup again"
}
# torch first: DeepSpeed's setup inspects the installed torch.
echo "setup: installing torch"
install torch
echo "setup: installing the other dependencies and megads"
install --editable '.[dev]'
echo "setup: building the kernels"
"$VENV/bin/python" -m megads.ops.build || fail "the kernels' build is broken (see above)"
printf '%s' "$want" >"$STAMP"
echo "setup: done, in $VENV"
