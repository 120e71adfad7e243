#!/usr/bin/env python3
"""Benchmark 7: the sample index, and the blending of 10 and 100 datasets against Megatron's greedy rule and the memory.

The peer deals as Megatron does, one sample after another (`--peer <folder>` takes the compiled loop of a megatron-core
that is unpacked there in place of the Python one). The limit writes the same bytes with one `numpy.copyto`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megads.data.blend import BalancedOrder
from megads.data.index_maps import build_sample_index
from megads.data.megatron_maps import MegatronOrder
from scripts.bench.results import Verdict, add_results_option, against_rate, record

SEQ_LEN = 2048
ROW = 7
TARGETS = {"sample index, documents": 1.0, "blend of 10 datasets, samples": 1.0, "blend of 100 datasets, samples": 3.0}
"""By work: how many times as fast as Megatron's C++."""
Work = Callable[[], object]


def rates(works: dict[str, tuple[int, Work]], rounds: int) -> dict[str, float]:
    """Median items a second of each work, all works alternating."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (count, work) in works.items():
            begin = time.perf_counter()
            work()
            found[name].append(count / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in found.items()}


def copying(bytes_each: int, count: int) -> Work:
    """Writes so many bytes as the result has."""
    source, target = np.ones(count * bytes_each, np.uint8), np.empty(count * bytes_each, np.uint8)
    return lambda: np.copyto(target, source)


def peer_helpers(folder: Path | None) -> object:
    """The compiled helpers of a megatron-core unpacked in a folder; None without one."""
    if folder is None:
        return None
    sys.path.insert(0, str(folder / "megatron" / "core" / "datasets"))
    import helpers_cpp

    return helpers_cpp


def sample_index(documents: int, rounds: int, helpers: object) -> dict[str, float]:
    """Documents a second."""
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


def blending(datasets: int, samples: int, rounds: int, helpers: object) -> dict[str, float]:
    """Samples a second."""
    weights = np.random.default_rng(1).random(datasets)
    weights /= weights.sum()
    order, numbers = BalancedOrder(weights.tolist()), np.arange(samples)
    few = samples // 100
    works: dict[str, tuple[int, Work]] = {
        "ours": (samples, lambda: order.place(numbers)),
        "limit": (samples, copying(16, samples)),
        "peer": (few, lambda: MegatronOrder(weights.tolist(), few).place(numbers[:few])),
    }
    if helpers is not None:
        chosen, places = np.empty(samples, np.int16), np.empty(samples, np.int64)
        build = helpers.build_blending_indices  # type: ignore[attr-defined]
        works["peer"] = (samples, lambda: build(chosen, places, weights, datasets, samples, False))
    return rates(works, rounds)


def verdicts_of(figures: dict[str, dict[str, float]], compiled_peer: bool) -> list[Verdict]:
    """Targets are against the compiled loops; Megatron's rule in Python only shows what dealing one by one costs."""
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
    add_results_option(parser)
    arguments = parser.parse_args()
    helpers = peer_helpers(arguments.peer)
    figures = {"sample index, documents": sample_index(arguments.documents, arguments.rounds, helpers)}
    for datasets in (10, 100):
        name = f"blend of {datasets}, samples"
        figures[name] = blending(datasets, arguments.samples, arguments.rounds, helpers)
    for name, found in figures.items():
        shown = ", ".join(f"{who} {rate / 1e6:,.2f} M/s" for who, rate in found.items())
        ratios = ", ".join(f"{found['ours'] / rate:.2f} of the {who}" for who, rate in found.items() if who != "ours")
        print(f"{name}: {shown} ({ratios})")
    verdicts = verdicts_of(figures, helpers is not None)
    record(arguments.append, "blend", {"compiled_peer": helpers is not None, **figures}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
