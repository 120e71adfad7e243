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
from megads.ops.data_kernels import compiled_deal
from megads.tools.megatron_order import _deal_in_python
from scripts.bench.results import Comparison, add_results_option, record

SEQ_LEN = 2048
ROW = 7
OURS, PEER, PYTHON, LIMIT = "megads", "Megatron's C++", "Megatron's rule in Python", "its bytes written once"
Work = Callable[[], object]


def compared(
    work: str,
    count: int,
    ours: Work,
    bytes_each: int,
    peer: tuple[int, Work] | None,
    compiled: bool,
    target: float = 1.0,
) -> Comparison:
    """Compares with Megatron's compiled loop; its rule in Python only shows the cost of one sample at a time."""
    sides, items = {OURS: ours, LIMIT: copying(bytes_each, count)}, {OURS: count / 1e6, LIMIT: count / 1e6}
    against = PEER if compiled else PYTHON
    if peer is not None:
        items[against], sides[against] = peer[0] / 1e6, peer[1]
    return Comparison(ROW, work, sides, OURS, {PEER: target, PYTHON: None, LIMIT: None}, LIMIT, items, "M/s")


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


def sample_index(documents: int, helpers: object) -> Comparison:
    """Building the sample index."""
    random = np.random.default_rng(0)
    sizes = random.integers(100, 2000, documents).astype(np.int32)
    order = random.permutation(documents).astype(np.int32)
    peer: tuple[int, Work] | None = None
    if helpers is not None:
        tokens, build = int(sizes.sum()), helpers.build_sample_idx_int64  # type: ignore[attr-defined]
        peer = documents, lambda: build(sizes, order, SEQ_LEN, 1, tokens, True, 1)
    work = "sample index, documents"
    return compared(work, documents, lambda: build_sample_index(sizes[order], SEQ_LEN), 4, peer, helpers is not None)


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


def blending(datasets: int, samples: int, helpers: object) -> list[Comparison]:
    """The blend in Megatron's and in megads' order."""
    weights, numbers, dealt = some_weights(datasets), np.arange(samples), np.empty(samples, np.int16)
    order, deal, peer = BalancedOrder(weights.tolist()), compiled_deal(print), megatrons_loop(weights, samples, helpers)
    work, compiled = f"blend of {datasets} datasets, samples", helpers is not None

    def megatrons() -> object:
        return deal(weights, np.zeros_like(weights), 0, dealt)

    found = [compared(f"Megatron's {work}", samples, megatrons, 2, peer, compiled)]
    if datasets > 2:
        target = 3.0 if datasets == 100 else 1.0
        found.append(compared(work, samples, lambda: order.place(numbers), 16, peer, compiled, target))
    return found


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
    comparisons = [sample_index(arguments.documents, helpers)]
    for datasets in (2, 10, 100):
        comparisons += blending(datasets, arguments.samples, helpers)
    found = {comparison.work: comparison.measure(arguments.rounds, warm_up=0) for comparison in comparisons}
    verdicts = [verdict for each in comparisons for verdict in each.verdicts(found[each.work], "median_ms")]
    record(arguments.append, "blend", {"works": found}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
