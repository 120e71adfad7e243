#!/usr/bin/env bash
# Creates .venv with the pinned dependencies and an editable install of megads: scripts/setup.sh [demo|dev|mutation].
# demo is what training and its report need, dev (the default) adds what tests and benchmarks need. A second call does
# nothing unless pyproject.toml or constraints.txt changed. Needs Python >= 3.11; scripts/install.py does the work.
#   PYTHON=/path/to/python scripts/setup.sh     selects the interpreter
#   VENV=/path/to/venv scripts/setup.sh         creates the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv}

# Isolated, and without site-packages: no variable and no broken package of the user can stop the installation.
declare -a names=("$VENV/bin/python" ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python)
for python in "${names[@]}"; do
    if "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" -I -S -B scripts/install.py "$@"
    fi
done
printf 'setup: no Python >= 3.11 found (tried %s). Install one, or name it: PYTHON=/path/to/python3.11 make demo\n' \
    "$(printf '%s, ' "${names[@]:1}" | sed 's/, $//')" >&2
exit 1
