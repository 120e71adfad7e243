#!/usr/bin/env python3
"""Benchmark 6, batches per second: megads' loader, reading one sample at a time, and a torch DataLoader.

All read samples of the same files, alternating, in one process, and hold the 64 micro-batches of a step, as a run does.
Reading one sample at a time is what megads did before. The hardware limit is the two casts to int64 that make tokens
and labels, from a cached block. Run from the repository: python -m scripts.bench.loader
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megads.batch import BatchInfo, MicroBatch
from megads.data.indexed.dataset import IndexedDataset
from megads.data.sampling.loader import Packing, assemble
from megads.data.sampling.samples import TrainSamples
from scripts.bench.results import add_results_option, against_rate, record
from scripts.bench.synthetic_dataset import write

VOCAB_SIZE = 32000
MICRO_BATCHES = 64
ROW = 6
BORDERS = Packing(document_mask=True, reset_positions=True)


def read_one(samples: TrainSamples, sample: int, out: np.ndarray[Any, Any]) -> None:
    """Reads the tokens of one sample, document by document."""
    epoch, position = divmod(sample, samples.samples_per_map)
    epoch_map = samples._epoch_map(epoch)
    place_in_order, offset = epoch_map.sample_index[int(epoch_map.shuffle[position])].tolist()
    place = 0
    while place < out.size:
        document = int(epoch_map.document_order[place_in_order])
        tokens = samples.dataset.document_tokens(document, offset)[: out.size - place]
        out[place : place + tokens.size] = tokens
        place_in_order, offset, place = place_in_order + 1, 0, place + tokens.size


class OneSampleAtATime(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset like Megatron's GPTDataset: each item is read, cast and turned into tensors separately."""

    def __init__(self, samples: TrainSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples.samples_per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = np.empty(self.samples.seq_len + 1, np.int64)
        read_one(self.samples, index, tokens)
        text = torch.from_numpy(tokens)
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": torch.ones(self.samples.seq_len),
        }


def single_reads(samples: TrainSamples, ids_mb: np.ndarray[Any, Any]) -> list[MicroBatch]:
    """The loader before batches were assembled from runs."""
    batches = []
    for ids_b in ids_mb:
        block = np.empty((ids_b.size, samples.seq_len + 1), np.int64)
        for row, sample in enumerate(ids_b):
            read_one(samples, int(sample), block[row])
        assert block.min() >= 0 and block.max() < VOCAB_SIZE
        tokens = torch.from_numpy(block)
        mask = torch.from_numpy(np.ones((ids_b.size, samples.seq_len), np.float32))
        info = BatchInfo(torch.from_numpy(ids_b), seq_len=samples.seq_len)
        batches.append(MicroBatch(info, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask))
    return batches


def casts_alone(block: np.ndarray[Any, Any], ids_mb: np.ndarray[Any, Any]) -> list[Any]:
    """Only the two casts."""
    return [(block[:, :-1].astype(np.int64), block[:, 1:].astype(np.int64)) for _ in ids_mb]


def sides(samples: TrainSamples, micro: int) -> dict[str, Callable[[int], Any]]:
    """Returns the timed functions of the step, by name."""
    step = MICRO_BATCHES * micro

    def ids(number: int) -> np.ndarray[Any, Any]:
        return (number * step + np.arange(step)).reshape(MICRO_BATCHES, micro)

    peers: dict[str, Iterator[Any]] = {}

    def peer(workers: int) -> Callable[[int], list[Any]]:
        def run(_: int) -> list[Any]:
            found = peers.get(str(workers))
            if found is None:
                loader = DataLoader(OneSampleAtATime(samples), batch_size=micro, shuffle=True, num_workers=workers)
                found = peers[str(workers)] = itertools.chain.from_iterable(itertools.repeat(loader))
            return list(itertools.islice(found, MICRO_BATCHES))

        return run

    block = np.zeros((micro, samples.seq_len + 1), np.uint16)
    return {
        "megads, assembling": lambda number: assemble(samples, ids(number), VOCAB_SIZE, True, Packing()),
        "megads, with borders": lambda number: assemble(samples, ids(number), VOCAB_SIZE, True, BORDERS),
        "one read a sample (before)": lambda number: single_reads(samples, ids(number)),
        "torch DataLoader, in process": peer(0),
        "torch DataLoader, 2 workers": peer(2),
        "casts alone (limit)": lambda number: casts_alone(block, ids(number)),
    }


def measure(samples: TrainSamples, micro: int, rounds: int) -> dict[str, float]:
    """Returns the median samples per second of each side."""
    timed = sides(samples, micro)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 2):
        for name, run in timed.items():
            begin = time.perf_counter()
            held = run(number)
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
            del held
    return {name: MICRO_BATCHES * micro / statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    add_results_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        documents = write(prefix, arguments.tokens, VOCAB_SIZE)
        samples = TrainSamples(IndexedDataset(prefix), range(documents), arguments.seq_len, 0)
        rates = measure(samples, arguments.micro_batch_size, arguments.rounds)
    base = rates["torch DataLoader, in process"]
    for name, rate in rates.items():
        print(
            f"{name:30} {rate:9,.0f} samples/s {rate * arguments.seq_len / 1e6:8,.0f} M tokens/s {rate / base:6.2f} x"
        )
    ours, work = rates["megads, assembling"], f"samples of {arguments.seq_len} tokens"
    record(
        arguments.append,
        "loader",
        {"tokens": arguments.tokens, "seq_len": arguments.seq_len, "samples_per_s": rates},
        [
            against_rate(ROW, work, ours, "torch DataLoader over one sample at a time", base, "samples/s", 10.0),
            against_rate(ROW, work, ours, "casts alone", rates["casts alone (limit)"], "samples/s", None, limit=True),
        ],
    )


if __name__ == "__main__":
    main()
