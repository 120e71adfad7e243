#!/usr/bin/env python3
"""Compiles megads' kernels, the CPU's and the GPU's beside each other; exit 1 and the reason where one cannot be had.

python -m scripts.bench.gpu_build [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from megads.ops import build, build_cuda
from megads.ops.build import KernelsUnavailable


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without the GPU's")
    cuda = parser.parse_args().device == "cuda"
    makes = [build.build, build_cuda.build_library] if cuda else [build.build]
    with ThreadPoolExecutor() as threads:
        made = [threads.submit(make, lambda text: print(text, flush=True)) for make in makes]
    try:
        for library in made:
            print(library.result())
    except KernelsUnavailable as error:
        print(f"no kernels: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
