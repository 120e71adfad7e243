#!/usr/bin/env python3
"""Benchmark 7: sample index and blending of 2, 10 and 100 datasets against Megatron's greedy rule and memory bandwidth.

Blends in megads' order, and in Megatron's (`data.order=megatron`), with megads' compiled loop. The peer is Megatron's
loop: `--peer <folder>` takes the compiled one of an unpacked megatron-core instead of one in Python. The limit writes
the same bytes with one `numpy.copyto`. `--cached <samples>` instead writes Megatron's order of that many samples into a
cache, as a launcher does, and opens it as a rank does; it prints time and memory of both.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megads.data.sampling.blend import BalancedOrder
from megads.data.sampling.cached_arrays import ArrayCache
from megads.data.sampling.index_maps import build_sample_index
from megads.data.sampling.megatron import MegatronOrder, _deal_in_python
from megads.ops.data_kernels import compiled_deal
from scripts.bench.results import Verdict, add_results_option, against_rate, record

SEQ_LEN = 2048
ROW = 7
TARGETS = {
    "sample index, documents": 1.0,
    "blend of 10 datasets, samples": 1.0,
    "blend of 100 datasets, samples": 3.0,
    "Megatron's blend of 2 datasets, samples": 1.0,
    "Megatron's blend of 10 datasets, samples": 1.0,
    "Megatron's blend of 100 datasets, samples": 1.0,
}
"""By work: how many times as fast as Megatron's C++."""
Work = Callable[[], object]


def rates(works: dict[str, tuple[int, Work]], rounds: int) -> dict[str, float]:
    """Returns the median items per second of each case; all cases alternate."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (count, work) in works.items():
            begin = time.perf_counter()
            work()
            found[name].append(count / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in found.items()}


def copying(bytes_each: int, count: int) -> Work:
    """Returns a function that writes as many bytes as the result has."""
    source, target = np.ones(count * bytes_each, np.uint8), np.empty(count * bytes_each, np.uint8)
    return lambda: np.copyto(target, source)


def peer_helpers(folder: Path | None) -> object:
    """Returns the compiled helpers of a megatron-core unpacked in a folder, or None without a folder."""
    if folder is None:
        return None
    sys.path.insert(0, str(folder / "megatron" / "core" / "datasets"))
    import helpers_cpp

    return helpers_cpp


def sample_index(documents: int, rounds: int, helpers: object) -> dict[str, float]:
    """Documents per second of building the sample index."""
    random = np.random.default_rng(0)
    sizes = random.integers(100, 2000, documents).astype(np.int32)
    order = random.permutation(documents).astype(np.int32)
    works: dict[str, tuple[int, Work]] = {
        "ours": (documents, lambda: build_sample_index(sizes[order], SEQ_LEN)),
        "limit": (documents, copying(4, documents)),
    }
    if helpers is not None:
        tokens = int(sizes.sum())
        build = helpers.build_sample_idx_int64  # type: ignore[attr-defined]
        works["peer"] = (documents, lambda: build(sizes, order, SEQ_LEN, 1, tokens, True, 1))
    return rates(works, rounds)


def some_weights(datasets: int) -> npt.NDArray[np.float64]:
    """Returns weights that sum to 1."""
    weights = np.random.default_rng(1).random(datasets)
    return weights / weights.sum()


def megatrons_loop(weights: npt.NDArray[np.float64], samples: int, helpers: object) -> tuple[int, Work]:
    """Returns a number of samples (a hundredth for the Python loop) and Megatron's loop over them."""
    if helpers is None:
        few = samples // 100
        return few, lambda: _deal_in_python(weights, np.zeros_like(weights), 0, np.empty(few, np.int16))
    chosen, places = np.empty(samples, np.int16), np.empty(samples, np.int64)
    build = helpers.build_blending_indices  # type: ignore[attr-defined]
    return samples, lambda: build(chosen, places, weights, weights.size, samples, False)


def blending(datasets: int, samples: int, rounds: int, helpers: object) -> dict[str, float]:
    """Samples per second of megads' blend."""
    weights = some_weights(datasets)
    order, numbers = BalancedOrder(weights.tolist()), np.arange(samples)
    works: dict[str, tuple[int, Work]] = {
        "ours": (samples, lambda: order.place(numbers)),
        "limit": (samples, copying(16, samples)),
        "peer": megatrons_loop(weights, samples, helpers),
    }
    return rates(works, rounds)


def megatrons_blending(datasets: int, samples: int, rounds: int, helpers: object) -> dict[str, float]:
    """Samples per second of the blend in Megatron's order."""
    weights, dealt = some_weights(datasets), np.empty(samples, np.int16)
    deal = compiled_deal(print)
    works: dict[str, tuple[int, Work]] = {
        "ours": (samples, lambda: deal(weights, np.zeros_like(weights), 0, dealt)),
        "limit": (samples, copying(2, samples)),
        "peer": megatrons_loop(weights, samples, helpers),
    }
    return rates(works, rounds)


def cached_order(datasets: int, samples: int, folder: str) -> None:
    """Opens Megatron's order of this many samples from a cache, built if missing; prints time and memory."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    order = MegatronOrder(some_weights(datasets).tolist(), samples, ArrayCache("", folder))
    opened = time.perf_counter()
    order.place(np.arange(samples // 2, samples // 2 + 2048))
    placed = time.perf_counter()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{datasets} datasets, {samples:,} samples: open {opened - begin:.2f} s, place 2,048 in "
        f"{(placed - opened) * 1e3:.1f} ms, {grown:.0f} MiB"
    )


def in_processes(samples: int) -> None:
    """Runs `cached_order` in separate processes: one that builds the order, two that open it."""
    for datasets in (2, 10, 100):
        with tempfile.TemporaryDirectory() as folder:
            for who in ("deals", "opens first", "opens"):
                call = f"cached_order({datasets}, {samples}, {folder!r})"
                command = [sys.executable, "-c", f"from scripts.bench.blend import cached_order; {call}"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                print(f"{who}: {done.stdout.strip()}", flush=True)
                time.sleep(3)  # every process verifies newer files


def verdicts_of(figures: dict[str, dict[str, float]], compiled_peer: bool) -> list[Verdict]:
    """Compares with the compiled loops; Megatron's rule in Python only shows the cost of one sample at a time."""
    peer = "Megatron's C++" if compiled_peer else "Megatron's rule in Python"
    return [
        against_rate(
            ROW,
            work,
            found["ours"] / 1e6,
            peer,
            found["peer"] / 1e6,
            "M/s",
            TARGETS.get(work) if compiled_peer else None,
        )
        for work, found in figures.items()
        if "peer" in found
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="folder of an unpacked megatron-core")
    parser.add_argument(
        "--cached", type=int, help="write Megatron's order of this many samples into a cache, and open it"
    )
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.cached is not None:
        in_processes(arguments.cached)
        return 0
    helpers = peer_helpers(arguments.peer)
    figures = {"sample index, documents": sample_index(arguments.documents, arguments.rounds, helpers)}
    for datasets in (10, 100):
        name = f"blend of {datasets} datasets, samples"
        figures[name] = blending(datasets, arguments.samples, arguments.rounds, helpers)
    for datasets in (2, 10, 100):
        name = f"Megatron's blend of {datasets} datasets, samples"
        figures[name] = megatrons_blending(datasets, arguments.samples, arguments.rounds, helpers)
    for name, found in figures.items():
        shown = ", ".join(f"{who} {rate / 1e6:,.2f} M/s" for who, rate in found.items())
        ratios = ", ".join(f"{found['ours'] / rate:.2f} of the {who}" for who, rate in found.items() if who != "ours")
        print(f"{name}: {shown} ({ratios})")
    verdicts = verdicts_of(figures, helpers is not None)
    record(arguments.append, "blend", {"compiled_peer": helpers is not None, **figures}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
