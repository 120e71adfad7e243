#!/usr/bin/env bash
# Times training steps in fp32 and bf16 as this machine is, and as one whose processor has AVX2 only:
#   scripts/bench/processors.sh [--only demo row1] [--quick]
# See `scripts/bench/processors.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${VENV:-.venv}/bin/python" -m scripts.bench.processors "$@"
