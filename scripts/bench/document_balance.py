#!/usr/bin/env python3
"""How evenly data-parallel ranks share the attention of packed documents, in order and with data.balance_documents.

    python -m scripts.bench.document_balance <dataset prefix> [--seq-len 8192] [--batch 256] [--steps 50]

The dataset comes from `megads preprocess`; document lengths decide everything. A rank's load is its number of pairs of
a query and a key in a step (`attention_pairs`); the step waits for the rank with the largest. Shown: largest load over
mean load, mean over the steps; the same of the micro-batches that ranks compute at the same time, which matters with a
pipeline; and the time in which one rank assigns a step, which its prefetching thread spends.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from megads.data.indexed.dataset import IndexedDataset
from megads.data.sampling.loader import step_ids
from megads.data.sampling.runs import attention_pairs
from megads.data.sampling.samples import TrainSamples


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256, help="samples in a step")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    dataset = IndexedDataset(arguments.dataset)
    samples = TrainSamples(dataset, range(dataset.num_documents), arguments.seq_len, seed=1234)
    lengths = np.diff(dataset.document_bounds(np.arange(dataset.num_documents)), axis=0)[0]
    shares = ", ".join(f"{share:g}%: {np.percentile(lengths, share):,.0f}" for share in (10, 50, 90, 99, 100))
    documents = f"{dataset.num_documents:,} documents, {lengths.sum():,} tokens"
    print(f"{documents}; tokens of a document by percentile: {shares}")
    print("largest load over mean load; the first two columns of ranks, the others of micro-batches at the same time")
    print(f"{'ranks':>6}{'in order':>20}{'balanced':>10}{'in order':>27}{'balanced':>10}")
    for dp in (2, 4, 8, 16, 32, 64):
        if arguments.batch % (dp * arguments.micro_batch):
            break
        figures, taken_s = [], []
        for step in range(arguments.steps):
            first, of_step = step * arguments.batch, []
            pairs = attention_pairs(
                samples.runs(np.arange(first, first + arguments.batch)), arguments.batch, arguments.seq_len
            )
            for balanced in (False, True):
                begin = time.perf_counter()
                ids = step_ids(samples, first, arguments.batch, arguments.micro_batch, dp, balanced=balanced)
                taken_s.append(time.perf_counter() - begin)
                loads = pairs[ids - first].sum(2)
                of_ranks = loads.sum(1)
                of_step += [of_ranks.max() / of_ranks.mean(), loads.max(0).sum() / loads.mean(0).sum()]
            figures.append(of_step)
        rank, micro_batch, rank_balanced, micro_batch_balanced = np.mean(figures, axis=0)
        taken = f"{1e3 * np.median(taken_s[1::2]):.1f} ms a step"
        print(f"{dp:6}{rank:20.2f}{rank_balanced:10.2f}{micro_batch:27.2f}{micro_batch_balanced:10.2f}    {taken}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
