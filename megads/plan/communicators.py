"""What a rank takes of a GPU beside its tensors: CUDA, cuBLAS, and the buffers of NCCL's communicators.

NCCL makes a communicator when its ranks first use it, and allocates buffers for every channel and every neighbour: at
the receiving end one for each of its three protocols, at the sending end a page for pointers (src/transport/p2p.cc; the
sizes are NCCL's defaults in src/init.cc and src/include/device.h, NCCL 2.28). Every allocation takes whole pages of 2
MiB. How many channels there are follows from the machine: the figures here are those of GPUs that a switch of NVLink
connects, the most that a communicator takes; between nodes there are fewer. None has been measured yet:
`scripts/bench/gpu.sh --stage memory` measures all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megads.parallel.config import GRADIENT_STAGES, ParallelConfig
from megads.parallel.pipeline_actions import P2P_CTAS

_MIB = 2**20
CONTEXT_BYTES = 640 * _MIB
"""A CUDA context on Hopper and the modules of torch's, cuBLAS' and megads' kernels; an estimate."""
CUBLAS_BYTES = 2 * 32 * _MIB
"""Workspaces of cuBLAS and cuBLASLt on Hopper, 32 MiB each as torch sets them; `:4096:8` of deterministic runs is the
same size."""
PAGE_BYTES = 2 * _MIB
CHANNELS = 24
"""Of a collective communicator; those between two ranks that send and receive have `P2P_CTAS`."""
_STEPS = 8
_LL_BYTES = 8 * 512 * _STEPS * 16
_LL128_BYTES = 120 * 640 * _STEPS * 8
_SIMPLE_BYTES = 4 * _MIB
SEND_BYTES = PAGE_BYTES
RECEIVE_BYTES = -(-(_LL_BYTES + _LL128_BYTES + _SIMPLE_BYTES) // PAGE_BYTES) * PAGE_BYTES
"""Of one channel to, and from, one neighbour: 2 and 10 MiB."""


@dataclass(frozen=True)
class Communicator:
    """One that a rank opens.

    Attributes:
        name: what it is for.
        ranks: members.
        pairs: one-way messages to one neighbour and from it; else collectives.
    """

    name: str
    ranks: int
    pairs: bool = False

    @property
    def bytes(self) -> int:
        """Of this rank's GPU: a ring, and where there are more than two ranks trees, whose neighbours are others."""
        if self.pairs:
            return P2P_CTAS * (SEND_BYTES + RECEIVE_BYTES)
        neighbours = 1 if self.ranks == 2 else 2
        return neighbours * CHANNELS * (SEND_BYTES + RECEIVE_BYTES)


def communicators(parallel: ParallelConfig, rank: int, *, tied: bool) -> list[Communicator]:
    """Those that a rank of the pipeline opens during training.

    Args:
        parallel: the layout.
        rank: along the pipeline.
        tied: embedding and head share their weight.
    """
    return [found for found in _all(parallel, rank, tied) if found.ranks > 1]


def _all(parallel: ParallelConfig, rank: int, tied: bool) -> Iterator[Communicator]:
    yield Communicator("all ranks", parallel.world_size)
    yield Communicator("tensor parallel", parallel.tp)
    yield Communicator("context parallel", parallel.cp)
    yield Communicator("gradients", parallel.data_size)
    if parallel.zero_stage in GRADIENT_STAGES and parallel.shard_size < parallel.data_size:
        yield Communicator("shards", parallel.shard_size)
        yield Communicator("replicas of a shard", parallel.data_size // parallel.shard_size)
    yield Communicator("pipeline", parallel.pp)
    placement = parallel.placement
    pairs = {frozenset(pair) for pair in pairwise(placement.ranks)}
    # Messages up and messages down the pipeline have a communicator each, so a pair opens two, each for one way.
    for neighbour in sorted({other for pair in pairs if rank in pair for other in pair} - {rank}):
        yield Communicator(f"messages with stage {neighbour}", 2, pairs=True)
    if tied and rank in placement.ends and len(set(placement.ends)) == 2:
        yield Communicator("tied embedding", 2)


def beside_tensors(parallel: ParallelConfig, rank: int, *, tied: bool) -> dict[str, int]:
    """Bytes of a rank's GPU beside its tensors, by what takes them; arguments as of `communicators`."""
    found = communicators(parallel, rank, tied=tied)
    return {"CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES} | {
        f"NCCL, {communicator.name}": communicator.bytes for communicator in found
    }
