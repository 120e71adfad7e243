#!/usr/bin/env python3
"""Benchmark 14: small batches of a blend of many small datasets, against megatron-core's BlendedDataset.

Both read the same files, alternating, in one process: megads in either order of the blend, as the 16 micro-batches of 4
that a rank reads for a step; megatron-core one sample at a time, and also collated into the same micro-batches. Judged
by the CPU time of one thread. Run from the repository: python -m scripts.bench.many_datasets
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from megads.data.config import DataConfig, DatasetConfig, Order
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.blend import BlendedSamples, BlendPart
from megads.data.sampling.datasets import open_datasets
from megads.data.sampling.loader import PLAIN, assemble
from scripts.bench.results import Comparison, add_results_option, record
from scripts.bench.turns import add_judge_option

ROW = 14
VOCAB_SIZE, SEED = 1000, 1
MICRO = 4
ALONE, COLLATED = "megatron-core, one by one", "megatron-core, collated"
STEPS = 100
"""Steps after which the same samples are read again."""


def write(folder: Path, datasets: int) -> list[str]:
    """Writes datasets of 200 documents of 50 to 3,000 tokens."""
    random, made = np.random.default_rng(0), []
    for number in range(datasets):
        with IndexedDatasetWriter(folder / f"set_{number}", np.uint16) as writer:
            for size in random.integers(50, 3001, 200).tolist():
                writer.append(random.integers(0, VOCAB_SIZE, size))
        made.append(str(folder / f"set_{number}"))
    return made


def theirs(paths: list[str], weights: list[float], seq_len: int, samples: int, cache: Path) -> Any:
    """megatron-core's training dataset; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        except ImportError:
            return None
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_len,
        blend=(paths, weights),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=SimpleNamespace(vocab_size=VOCAB_SIZE, eod=0, pad=-1, unique_identifiers={"class": "none"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def ours(
    paths: list[str], weights: list[float], seq_len: int, samples: int, cache: Path, order: Order
) -> BlendPart | BlendedSamples:
    """megads' blend of the same datasets."""
    train = [DatasetConfig(path, weight, max_epochs=1e9) for path, weight in zip(paths, weights, strict=True)]
    config = DataConfig(train=train, split=[1.0, 0.0], order=order, cache_dir=str(cache))
    return open_datasets(config, seq_len, SEED, VOCAB_SIZE, samples)[0]


def stepping(read: Callable[[npt.NDArray[np.int64]], object], batch: int) -> Callable[[], object]:
    """Returns a function that reads the sample ids of consecutive steps."""
    steps = cycle(range(STEPS))
    return lambda: read(next(steps) * batch + np.arange(batch))


def sides_of(folder: Path, paths: list[str], seq_len: int, batch: int) -> dict[str, Callable[[], object]]:
    """Returns megads' sides, one for each order, and megatron-core's if it is installed."""
    samples, weights = STEPS * batch, (np.random.default_rng(1).random(len(paths)) + 0.1).tolist()

    def assembling(order: Order) -> Callable[[], object]:
        source = ours(paths, weights, seq_len, samples, folder, order)
        return stepping(lambda ids: assemble(source, ids.reshape(-1, MICRO), VOCAB_SIZE, True, PLAIN), batch)

    sides = {f"megads, order={order.value}": assembling(order) for order in Order}
    peer = theirs(paths, weights, seq_len, samples, folder)
    if peer is not None:
        dist.destroy_process_group()
        sides[ALONE] = stepping(lambda ids: [peer[number] for number in ids.tolist()], batch)
        sides[COLLATED] = stepping(
            lambda ids: [default_collate([peer[n] for n in four]) for four in ids.reshape(-1, MICRO).tolist()], batch
        )
    return sides


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 64])
    parser.add_argument("--rounds", type=int, default=200)
    add_judge_option(parser)
    parser.set_defaults(by="processor_ms")
    add_results_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures, verdicts = {}, []
    with tempfile.TemporaryDirectory() as name:
        paths = write(Path(name), arguments.datasets)
        for seq_len in arguments.seq_len:
            sides = sides_of(Path(name), paths, seq_len, arguments.batch)
            work = f"{arguments.datasets} datasets, batch {arguments.batch}, S = {seq_len}"
            of_orders = [
                Comparison(ROW, f"{work}, {side}", sides, side, {ALONE: 1.0, COLLATED: 1.0})
                for side in sides
                if side.startswith("megads")
            ]
            figures[str(seq_len)] = found = of_orders[0].measure(arguments.rounds)
            verdicts += [verdict for each in of_orders for verdict in each.verdicts(found, arguments.by)]
    record(arguments.append, "many_datasets", {"ms_a_batch": figures}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
