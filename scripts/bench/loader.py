#!/usr/bin/env python3
"""Benchmark 6, batches per second: megads' loader and a torch DataLoader.

All read samples of the same files, alternating, in one process, and hold the 64 micro-batches of a step, as a run does.
The hardware limit is the two casts to int64 that make tokens
and labels, from a cached block. Run from the repository: python -m scripts.bench.loader
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megads.data.indexed.dataset import IndexedDataset
from megads.data.sampling.loader import Packing, assemble
from megads.data.sampling.samples import TrainSamples
from scripts.bench.results import Comparison, add_results_option, record
from scripts.bench.synthetic_dataset import write

OURS, PEER, LIMIT = "megads, assembling", "torch DataLoader over one sample at a time", "casts alone"
VOCAB_SIZE = 32000
MICRO_BATCHES = 64
ROW = 6
BORDERS = Packing(document_mask=True, reset_positions=True)


class OneSampleAtATime(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset like Megatron's GPTDataset: each item is read, cast and turned into tensors separately."""

    def __init__(self, samples: TrainSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples.samples_per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = np.empty(self.samples.seq_len + 1, np.int64)
        epoch, position = divmod(index, self.samples.samples_per_map)
        epoch_map = self.samples._epoch_map(epoch)
        place_in_order, offset = epoch_map.sample_index[int(epoch_map.shuffle[position])].tolist()
        place = 0
        while place < tokens.size:
            document = int(epoch_map.document_order[place_in_order])
            read = self.samples.dataset.document_tokens(document, offset)[: tokens.size - place]
            tokens[place : place + read.size] = read
            place_in_order, offset, place = place_in_order + 1, 0, place + read.size
        text = torch.from_numpy(tokens)
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": torch.ones(self.samples.seq_len),
        }


def sides(samples: TrainSamples, micro: int) -> dict[str, Callable[[], object]]:
    """Returns functions that read the next step, by name; each yields the 64 micro-batches."""
    step = MICRO_BATCHES * micro

    def ours(packing: Packing) -> Callable[[], object]:
        numbers = itertools.count()

        def read() -> object:
            ids = (next(numbers) * step + np.arange(step)).reshape(MICRO_BATCHES, micro)
            return assemble(samples, ids, VOCAB_SIZE, True, packing)

        return read

    def peer(workers: int) -> Callable[[], object]:
        loader = DataLoader(OneSampleAtATime(samples), batch_size=micro, shuffle=True, num_workers=workers)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return lambda: list(itertools.islice(batches, MICRO_BATCHES))

    block = np.zeros((micro, samples.seq_len + 1), np.uint16)
    return {
        OURS: ours(Packing()),
        "megads, with borders": ours(BORDERS),
        PEER: peer(0),
        "torch DataLoader, 2 workers": peer(2),
        LIMIT: lambda: [(block[:, :-1].astype(np.int64), block[:, 1:].astype(np.int64)) for _ in range(MICRO_BATCHES)],
    }


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
        timed = sides(samples, arguments.micro_batch_size)
        items = dict.fromkeys(timed, MICRO_BATCHES * arguments.micro_batch_size)
        work, targets = f"samples of {arguments.seq_len} tokens", {PEER: 10.0, LIMIT: None}
        comparison = Comparison(ROW, work, timed, OURS, targets, LIMIT, items, "samples/s")
        found = comparison.measure(arguments.rounds)
    record(arguments.append, "loader", {"sides": found}, comparison.verdicts(found, "median_ms"))


if __name__ == "__main__":
    main()
