#!/usr/bin/env python3
"""Benchmark 7: sample index and blending of 2, 10 and 100 datasets against Megatron's greedy rule and memory bandwidth.

Blends in megads' order, and in Megatron's (`data.order=megatron`), with megads' compiled loop. The peer is Megatron's
loop: `--peer <folder>` takes the compiled one of an unpacked megatron-core instead of one in Python. The limit writes
the same bytes with one `numpy.copyto`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megads.data.sampling.blend import BalancedOrder
from megads.data.sampling.index_maps import build_sample_index
from megads.data.sampling.megatron import _deal_in_python
from megads.ops.data_kernels import compiled_deal
from scripts.bench.results import Verdict, add_results_option, against_rate, record
from scripts.bench.turns import take_turns

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
    times = take_turns({name: work for name, (_, work) in works.items()}, rounds, warm_up=0)
    return {name: 1e3 * works[name][0] / found.summary["median_ms"] for name, found in times.items()}


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


def blending(datasets: int, samples: int, rounds: int, helpers: object) -> dict[str, dict[str, float]]:
    """Samples per second of the blend in megads' and in Megatron's order, by work."""
    weights, numbers, dealt = some_weights(datasets), np.arange(samples), np.empty(samples, np.int16)
    order, deal, peer = BalancedOrder(weights.tolist()), compiled_deal(print), megatrons_loop(weights, samples, helpers)
    megatrons = {
        "ours": (samples, lambda: deal(weights, np.zeros_like(weights), 0, dealt)),
        "limit": (samples, copying(2, samples)),
        "peer": peer,
    }
    found = {f"Megatron's blend of {datasets} datasets, samples": rates(megatrons, rounds)}
    if datasets > 2:
        own = {"ours": (samples, lambda: order.place(numbers)), "limit": (samples, copying(16, samples)), "peer": peer}
        found[f"blend of {datasets} datasets, samples"] = rates(own, rounds)
    return found


def verdicts_of(figures: dict[str, dict[str, float]], compiled_peer: bool) -> list[Verdict]:
    """Compares with the compiled loops; Megatron's rule in Python only shows the cost of one sample at a time."""
    peer = "Megatron's C++" if compiled_peer else "Megatron's rule in Python"
    return [
        against_rate(
            ROW, work, found["ours"] / 1e6, peer, found["peer"] / 1e6, "M/s", TARGETS[work] if compiled_peer else None
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
    for datasets in (2, 10, 100):
        figures |= blending(datasets, arguments.samples, arguments.rounds, helpers)
    for name, found in figures.items():
        shown = ", ".join(f"{who} {rate / 1e6:,.2f} M/s" for who, rate in found.items())
        ratios = ", ".join(f"{found['ours'] / rate:.2f} of the {who}" for who, rate in found.items() if who != "ours")
        print(f"{name}: {shown} ({ratios})")
    verdicts = verdicts_of(figures, helpers is not None)
    record(arguments.append, "blend", {"compiled_peer": helpers is not None, **figures}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
