#!/usr/bin/env python3
"""Compiles megads' CPU and GPU kernels concurrently, and reports how long each took.

    python -m scripts.bench.gpu_build [--device cuda] [--append bench.jsonl]

--device cpu omits the GPU kernels. An existing library takes no time. Exits with code 1 and the reason if one cannot be
built, or cannot be loaded into this torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megads.ops import build
from megads.ops.build import KernelsUnavailable
from megads.ops.config import Implementation, OpsConfig
from megads.ops.resolve import load
from scripts.bench.gpu_lines import add_line_options, appender

Make = Callable[[Callable[[str], None]], Path]


def seconds_of(make: Make) -> float:
    """Seconds until a library is built."""
    begin = time.monotonic()
    print(make(lambda text: print(text, flush=True)), flush=True)
    return time.monotonic() - begin


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    makes: dict[str, Make] = {"CPU": build.build}
    if cuda:
        makes["CUDA"] = build.build_cuda
    try:
        with ThreadPoolExecutor() as threads:
            made = {name: threads.submit(seconds_of, make) for name, make in makes.items()}
        took = ", ".join(f"{name} {future.result():.0f} s" for name, future in made.items())
    except KernelsUnavailable as error:
        print(f"no kernels: {error}")
        return 1
    begin = time.monotonic()
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    verdict = f"{took}; loaded into torch in {time.monotonic() - begin:.0f} s"
    appender(arguments, "gpu_build")({"name": "kernels compiled", "verdict": verdict})
    print(verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
