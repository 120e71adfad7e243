"""What a rank takes of a GPU beside its tensors."""

from __future__ import annotations

import pytest

from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.plan.communicators import CONTEXT_BYTES, CUBLAS_BYTES, RECEIVE_BYTES, beside_tensors, communicators


@pytest.mark.parametrize(
    ("parallel", "rank", "tied", "expected"),
    [
        (ParallelConfig(), 0, True, {}),
        (ParallelConfig(dp=4), 0, True, {"all ranks": 4, "gradients": 4}),
        (
            ParallelConfig(tp=2, cp=2, pp=4, dp=3), 1, True,
            {"all ranks": 48, "tensor parallel": 2, "context parallel": 2, "gradients": 6, "pipeline": 4,
             "messages with stage 0": 2, "messages with stage 2": 2},
        ),
        (
            ParallelConfig(pp=4), 3, True,
            {"all ranks": 4, "pipeline": 4, "messages with stage 2": 2, "tied embedding": 2},
        ),
        (
            # Virtual stages go round: the last rank sends to the first.
            ParallelConfig(pp=3, schedule=ScheduleName.interleaved, virtual_stages=2), 0, False,
            {"all ranks": 3, "pipeline": 3, "messages with stage 1": 2, "messages with stage 2": 2},
        ),
        (
            # A V ends where it begins: rank 0 holds embedding and head.
            ParallelConfig(pp=2, schedule=ScheduleName.zb_v), 0, True,
            {"all ranks": 2, "pipeline": 2, "messages with stage 1": 2},
        ),
        (
            ParallelConfig(dp=8, zero_stage=3, zero_shard_size=4), 0, False,
            {"all ranks": 8, "gradients": 8, "shards": 4, "replicas of a shard": 2},
        ),
    ],
)  # fmt: skip
def test_every_communicator_is_planned(
    parallel: ParallelConfig, rank: int, tied: bool, expected: dict[str, int]
) -> None:
    """Catches a group of a layout that the plan forgets, a neighbour of a virtual stage, and one that nobody opens."""
    assert {found.name: found.ranks for found in communicators(parallel, rank, tied=tied)} == expected


def test_bytes_follow_nccls_defaults() -> None:
    """Catches pages that are not whole, a neighbour counted once that sends and receives, and a process without its
    context. 24 channels of 2 + 10 MiB: one neighbour of two ranks, two neighbours of more; 8 between neighbours of the
    pipeline."""
    mib = 2**20
    assert 10 * mib == RECEIVE_BYTES
    taken = beside_tensors(ParallelConfig(pp=4), 1, tied=False)
    assert taken == {
        "CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES, "NCCL, all ranks": 576 * mib,
        "NCCL, pipeline": 576 * mib, "NCCL, messages with stage 0": 96 * mib, "NCCL, messages with stage 2": 96 * mib,
    }  # fmt: skip
    assert beside_tensors(ParallelConfig(tp=2), 0, tied=False)["NCCL, tensor parallel"] == 288 * mib
