"""The way of tokens to experts on other ranks."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megads.ops.token_dispatch import RowCounts
from megads.parallel.config import ParallelConfig
from megads.parallel.experts import ExpertExchange
from megads.parallel.grid import build_grid
from tests.distributed import run_ranks


def exchanged() -> tuple[bool, list[float], list[int], list[int]]:
    """Returns whether the sent rows were freed, this rank's rows, and their numbers on the device and on the host."""
    rank, layout = dist.get_rank(), ParallelConfig(dp=2, ep=2)
    exchange, sent, found = ExpertExchange(build_grid(layout, rank, 2).ep, None), [], []

    def rows() -> Tensor:
        # Two experts a rank. Rank 0 sends 1, 0, 2, 1 rows to them, rank 1 sends 0, 3, 1, 0; a row is 10 rank + expert.
        experts = [[0, 2, 2, 3], [1, 1, 1, 2]][rank]
        x_nh = 10.0 * rank + torch.tensor(experts, dtype=torch.float32, requires_grad=True)[:, None]
        sent.append(weakref.ref(x_nh))
        return x_nh

    def compute(x_mh: Tensor, counts: RowCounts) -> Tensor:
        # Gloo's thread drops its reference to the input shortly after it has told this one that the exchange is done.
        deadline = time.monotonic() + 10
        while sent[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        found.append((sent[0]() is None, x_mh.flatten().tolist(), counts.on_device.tolist(), list(counts.on_host)))
        return 2 * x_mh

    counts_e = torch.tensor([[1, 0, 2, 1], [0, 3, 1, 0]][rank])
    out_nh = exchange.run(rows, counts_e, compute)
    assert torch.equal(out_nh, 2 * rows())
    return found[0]


@pytest.mark.distributed
def test_rows_are_freed_once_they_are_sent() -> None:
    """Catches rows that stay in memory while their experts compute, beside the received ones, and numbers on the
    device that are not those of the host."""
    first, second = run_ranks(exchanged, 2)
    assert first == (True, [0.0, 11.0, 11.0, 11.0], [1, 3], [1, 3])
    assert second == (True, [2.0, 2.0, 12.0, 3.0], [3, 1], [3, 1])
