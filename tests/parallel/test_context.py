"""Tests how samples are sharded over context-parallel ranks, and keys and values gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.parallel.config import ParallelConfig, axis_ranks
from megads.parallel.context import ContextParallelCore, UlyssesCore, context_positions, shard_micro_batch
from megads.parallel.grid import Axis, build_grid
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def axis(rank: int, size: int) -> Axis:
    return Axis(rank, tuple(range(size)), None)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_held_once_and_causal_work_is_balanced(size: int) -> None:
    """Catches a chunk that is lost or held twice, and a last rank whose queries attend to more keys than another's."""
    places = [context_positions(24, rank, size, CPU) for rank in range(size)]
    assert sorted(torch.cat(places).tolist()) == list(range(24))
    assert len({int((p + 1).sum()) for p in places}) == 1
    assert all((p.diff() > 0).all() for p in places)


def test_every_part_of_a_micro_batch_is_sharded_alike() -> None:
    """Catches labels, masks, positions or documents that are sharded differently from the tokens, or not at all."""
    whole = {name: torch.arange(24).view(2, 12) + 100 * i for i, name in enumerate(("tokens", "labels", "at", "from"))}
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(0))
    info = BatchInfo(torch.tensor([5, 6]), position_ids_bs=whole["at"], document_starts=whole["from"])
    batch = MicroBatch(info, whole["tokens"], whole["labels"], mask)
    for rank in range(3):
        cut = shard_micro_batch(batch, axis(rank, 3), CPU)
        places = cut.info.sequence_index
        assert places is not None and cut.info.seq_len == 12
        assert places.tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]][rank]
        parts = (cut.tokens_bs, cut.labels_bs, cut.info.position_ids_bs, cut.info.document_starts, cut.loss_mask_bs)
        for part, of_all in zip(parts, (*whole.values(), mask), strict=True):
            assert part is not None and torch.equal(part, of_all[:, places])
        assert cut.info.sample_ids is info.sample_ids


def test_a_stage_without_tokens_shards_its_info() -> None:
    """Catches a middle stage that does not know the sequence length; the indices are one tensor, as caches require."""
    batch = MicroBatch(BatchInfo(torch.tensor([0]), seq_len=8))
    cut, again = (shard_micro_batch(batch, axis(0, 2), CPU) for _ in range(2))
    assert cut.info.sequence_index.tolist() == [0, 1, 6, 7] and cut.tokens_bs is None
    assert cut.info.sequence_index is again.info.sequence_index
    assert shard_micro_batch(batch, axis(0, 1), CPU) is batch


def test_metadata_of_whole_samples_is_kept_for_ulysses() -> None:
    """Catches attention over whole samples with the documents of a rank's tokens, metadata that stays behind when the
    micro-batch moves to a device, and a copy of it that the all-gather does not need."""
    starts = torch.arange(24).view(2, 12)
    info = BatchInfo(torch.tensor([5, 6]), position_ids_bs=starts, document_starts=starts)
    batch = MicroBatch(info, starts)
    cut = shard_micro_batch(batch, axis(1, 3), CPU, ulysses=3).info
    for whole in (cut.exchanged, cut.to(CPU).exchanged):
        assert whole is not None and whole.sequence_index is None and whole.seq_len == 12
        assert torch.equal(whole.sample_ids, info.sample_ids) and torch.equal(whole.document_starts, starts)
    assert cut.to(CPU).exchanged.host_document_starts is not None
    assert torch.equal(cut.document_starts, starts[:, [2, 3, 8, 9]])
    assert shard_micro_batch(batch, axis(1, 3), CPU).info.exchanged is None


@pytest.mark.parametrize(("size", "ulysses"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_ranks_that_exchange_heads_have_the_tokens_of_one_of_fewer_ranks(size: int, ulysses: int) -> None:
    """Catches metadata of other tokens than those that a group has after the all-to-all, and groups of other ranks."""
    starts = torch.arange(4 * size).expand(2, -1)
    batch = MicroBatch(BatchInfo(torch.tensor([5, 6]), position_ids_bs=starts, document_starts=starts), starts)
    parallel = ParallelConfig(cp=size, cp_ulysses=ulysses)
    for place, group in enumerate(axis_ranks("cp_inner", parallel)):
        cuts = [shard_micro_batch(batch, axis(rank, size), CPU, ulysses).info for rank in group]
        # As `_in_sample_order`: the first chunks in order of the ranks, then the second ones in reverse order.
        halves = [cut.sequence_index.chunk(2) for cut in cuts]
        together = torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])
        assert torch.equal(together, context_positions(4 * size, place, size // ulysses, CPU))
        for exchanged in (found for cut in cuts for found in (cut.exchanged, cut.to(CPU).exchanged)):
            assert exchanged is not None and exchanged.position_ids_bs is None and exchanged.seq_len == 4 * size
            assert torch.equal(exchanged.sequence_index, together)
            assert torch.equal(exchanged.document_starts, starts[:, together])
    assert axis_ranks("cp_outer", parallel)[0] == tuple(range(0, size, ulysses))


class Products(torch.nn.Module):
    """Stands in for an attention core: the gradient of the keys is the queries."""

    def forward(self, q_bntd: Tensor, k_bntd: Tensor, v_bntd: Tensor, info: BatchInfo) -> Tensor:
        self.keys, self.values = k_bntd.detach(), v_bntd.detach()
        return (k_bntd * q_bntd).sum() + 2 * (v_bntd * q_bntd).sum()


SIZE = 3


def gradients() -> Tensor:
    """Returns every rank's gradient, bf16 [SIZE, 1, 2, 12, 4]; their sum over ranks is exact in fp32."""
    generator = torch.Generator().manual_seed(0)
    shape = (SIZE, 1, 2, 12, 4)
    powers = 2.0 ** -torch.randint(0, 8, shape, generator=generator)
    return (torch.randint(-127, 128, shape, generator=generator) * powers).bfloat16()


def gather() -> list[bool]:
    """Whether one rank gets all ranks' keys and values in sample order, and the reduced gradients of its own."""
    grid = build_grid(ParallelConfig(cp=SIZE), torch.distributed.get_rank(), SIZE)
    places = context_positions(12, grid.cp.rank, SIZE, CPU)
    whole_k, whole_v = torch.randn(2, 1, 2, 12, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    k, v = (x[:, :, places].clone().requires_grad_() for x in (whole_k, whole_v))
    core = ContextParallelCore(Products(), grid.cp)
    core(gradients()[grid.cp.rank], k, v, BatchInfo(torch.tensor([0]))).backward()
    expected = gradients().float().sum(0).bfloat16()[:, :, places]
    return [
        torch.equal(core.core.keys, whole_k),
        torch.equal(core.core.values, whole_v),
        torch.equal(k.grad, expected),
        torch.equal(v.grad, 2 * expected),
    ]


@pytest.mark.distributed
def test_keys_are_in_sample_order_and_gradients_sum_in_fp32() -> None:
    """Catches chunks in rank order, keys swapped with values, and gradients reduced in bf16."""
    first, second, third = gradients()
    assert not torch.equal(first + second + third, gradients().float().sum(0).bfloat16()), "bf16 would do as well"
    assert run_ranks(gather, SIZE) == [[True] * 4] * SIZE


class WeightedKeys(torch.nn.Module):
    """Stands in for an attention core of two heads a rank: its weights are the gradient of the keys."""

    def narrow(self, rank: int, size: int) -> None:
        self.share = (rank, size)

    def forward(self, q_bwtd: Tensor, k_bwtd: Tensor, v_bwtd: Tensor, info: BatchInfo) -> Tensor:
        self.seen, self.info = (q_bwtd.detach(), k_bwtd.detach(), v_bwtd.detach()), info
        return q_bwtd + k_bwtd * gradients()[self.share[0]] + 2 * v_bwtd * gradients()[self.share[0]]


def exchange() -> list[bool]:
    """Whether a rank gets its heads of all tokens in sample order, and reduced gradients of repeated KV heads."""
    grid = build_grid(ParallelConfig(cp=SIZE), torch.distributed.get_rank(), SIZE)
    rank, places = grid.cp.rank, context_positions(12, grid.cp.rank, SIZE, CPU)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, heads, 12, 4, generator=generator).bfloat16() for heads in (6, 2, 2)]
    q, k, v = (x[:, :, places].clone().requires_grad_() for x in whole)
    core = UlyssesCore(WeightedKeys(), grid.cp)
    info = shard_micro_batch(MicroBatch(BatchInfo(torch.tensor([0]), seq_len=12)), grid.cp, CPU, ulysses=SIZE).info
    out = core(q, k, v, info)
    weights = gradients()
    out.sum().backward()
    of_heads = [whole[0], *(x.repeat_interleave(3, 1) for x in whole[1:])]
    own = [x[:, 2 * rank : 2 * rank + 2] for x in of_heads]
    every = torch.cat(list(weights), dim=1)  # of the six copies of two KV heads
    expected = every.unflatten(1, (2, 3)).float().sum(2).bfloat16()[:, :, places]
    whole_out = of_heads[0] + of_heads[1] * every + 2 * of_heads[2] * every
    return [
        core.core.share == (rank, SIZE) and core.core.info is info.exchanged,
        *(torch.equal(seen, wanted) for seen, wanted in zip(core.core.seen, own, strict=True)),
        torch.equal(out, whole_out[:, :, places]),
        torch.equal(q.grad, torch.ones_like(q)),
        torch.equal(k.grad, expected),
        torch.equal(v.grad, 2 * expected),
    ]


@pytest.mark.distributed
def test_tokens_become_heads_and_heads_tokens() -> None:
    """Catches heads or tokens in another order than that of the model and the sample, an output of another rank's
    tokens, and gradients of repeated KV heads that are summed in bf16 or not at all."""
    assert run_ranks(exchange, SIZE) == [[True] * 8] * SIZE
