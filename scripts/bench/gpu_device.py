#!/usr/bin/env python3
"""What gpu.sh ran on: the device, its copy and GEMM throughput, and the versions of the software.

python -m scripts.bench.gpu_device [--device cuda] [--append bench.jsonl]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

import megads
from megads.model.peak import device_peak_tflops
from megads.ops.apex import find_apex
from megads.runtime.environment import available_cores
from scripts.bench.device_clock import copy_bandwidth, matrix_flops_per_s
from scripts.bench.gpu_lines import Line, add_line_options, appender

PEERS = ("transformers", "flash-attn", "triton")
"""Packages that are benchmarked as peers if installed, and what torch.compile needs."""


def installed(package: str) -> str:
    """Version of a package, or that it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Version of NVIDIA's driver; empty without its tool."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def device_line(device: str) -> Line:
    """Returns names, sizes, versions and measured throughputs."""
    cuda = device == "cuda"
    line: Line = {"device": "CPU", "devices": 1, "memory_bytes": 0, "driver": ""}
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        line = {
            "device": properties.name, "devices": torch.cuda.device_count(), "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count, "driver": driver(),
        }  # fmt: skip
    return line | {
        "copy_bytes_per_s": copy_bandwidth(device, 20 if cuda else 3, 2**30 if cuda else 2**22),
        "matrix_tflops": matrix_flops_per_s(device, 20 if cuda else 3, 8192 if cuda else 256) / 1e12,
        "peak_tflops": device_peak_tflops(torch.device(device), torch.bfloat16, available_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "megads": megads.__version__,
        "deepspeed": installed("deepspeed"),
        "peers": {package: installed(package) for package in PEERS} | {"NVIDIA apex": find_apex().state.value},
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    arguments = parser.parse_args()
    line = device_line(arguments.device)
    appender(arguments, "gpu_device")(line)
    print(f"{line['devices']} x {line['device']}, torch {line['torch']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
