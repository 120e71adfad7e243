"""Defects in mixtures of experts, which tests/test_mutants.py applies to the running code.

Several were bugs of other trainers: Megatron-LM #7452 (gradients of experts averaged over the wrong ranks, balance
losses that depend on the number of micro-batches), torchtitan #2107 and #2233, DeepSpeed #7938.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megads.engine.stage_pipeline
import megads.model.moe
import megads.parallel.experts
from megads.batch import MicroBatch
from megads.engine.bucket import Bucket
from megads.engine.expert_balance import ExpertBalance
from megads.engine.native_engine import NativeEngine
from megads.model.moe import Experts, Router
from megads.ops.expert_slots import Slots
from megads.ops.token_dispatch import RowCounts
from megads.parallel.experts import ExpertExchange
from megads.parallel.partition import ExpertShard


def experts_reduced_over_all_data_ranks() -> None:
    inner = Bucket.finish

    def finish(self: Bucket) -> None:
        inner(self)
        if self.layout.expert:
            dist.all_reduce(self.gradient)

    Bucket.finish = finish


def experts_not_reduced() -> None:
    inner = Bucket.launch

    def launch(self: Bucket) -> None:
        inner(self)
        if self.layout.expert:
            self._reduction.wait()
            self._reduction, self.gradient = None, self.main_grad()[self.slice.start : self.slice.stop].clone()

    Bucket.launch = launch


def experts_in_reverse_order() -> None:
    inner = ExpertShard.held
    ExpertShard.held = lambda self, rows: inner(replace(self, rank=self.ranks - 1 - self.rank), rows)


def a_row_returned_twice() -> None:
    inner = megads.parallel.experts._by_expert

    def by_expert(*counts: Any) -> tuple[Tensor, Tensor]:
        order, inverse = inner(*counts)
        inverse[:1] = inverse[1:2]
        return order, inverse

    megads.parallel.experts._by_expert = by_expert


def rows_above_capacity_dropped() -> None:
    inner = Experts._compute

    def compute(self: Experts, rows: Tensor, counts: RowCounts) -> Tensor:
        capacity, start = -(-len(rows) // len(counts.on_host)), 0
        kept = torch.ones(len(rows), 1)
        for count in counts.on_host:
            kept[start + capacity : start + count] = 0.0
            start += count
        return inner(self, rows, counts) * kept

    Experts._compute = compute


def weights_include_the_bias() -> None:
    inner = Router._weights
    Router._weights = lambda self, scores, chosen: inner(self, scores + self.expert_bias, chosen)


def normalized_before_the_choice() -> None:
    Router._weights = lambda self, scores, chosen: (scores / scores.sum(-1, keepdim=True)).gather(-1, chosen)


def groups_of_the_first_experts() -> None:
    inner = megads.model.moe.top_choices

    def top_choices(scores: Tensor, count: int) -> Tensor:
        found = inner(scores, count)
        return torch.arange(count).expand_as(found) if scores.shape[-1] < 8 else found

    megads.model.moe.top_choices = top_choices


def counts_of_the_last_micro_batch() -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.statistics.copy_(ctx.own)
        return grad, torch.ones_like(ctx.like), None, None

    megads.model.moe._WithLoss.backward = staticmethod(backward)


def counts_of_one_rank() -> None:
    inner = ExpertBalance.update

    def update(self: ExpertBalance, norm: Tensor) -> None:
        self._axes = []
        inner(self, norm)

    ExpertBalance.update = update


def recomputed_tokens_counted_twice() -> None:
    inner = megads.model.moe._WithLoss.forward

    def forward(ctx: Any, x: Tensor, loss: Tensor, statistics: Tensor, own: Tensor) -> Tensor:
        # As often as the forward pass runs; the first expert shows it, as a common factor of all counts does not.
        statistics[0] += own[0]
        return inner(ctx, x, loss, statistics, own)

    megads.model.moe._WithLoss.forward = staticmethod(forward)


def balance_losses_of_each_micro_batch() -> None:
    inner = NativeEngine._counted

    def counted(self: NativeEngine, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        whole = inner(self, batches)
        own = [batch.info.step_tokens // len(batches) for batch in whole]
        return [replace(b, info=replace(b.info, step_tokens=n)) for b, n in zip(whole, own, strict=True)]

    NativeEngine._counted = counted


def sequences_balanced_on_each_rank() -> None:
    megads.parallel.experts._Sum.__call__ = lambda self, counts: counts


def weights_outside_of_the_region() -> None:
    inner = ExpertExchange.enter

    def enter(self: ExpertExchange, hidden: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entered, _, chosen = inner(self, hidden, weights, chosen)
        return entered, weights, chosen

    ExpertExchange.enter = enter


def routers_gradient_of_one_shard() -> None:
    inner = megads.engine.stage_pipeline.materialise

    def materialise(*args: Any) -> Any:
        layer = inner(*args)
        for name, parameter in layer.named_parameters():
            if "router" in name:
                parameter.gradient_partial = False
        return layer

    megads.engine.stage_pipeline.materialise = materialise


def load_of_the_first_step_kept() -> None:
    ExpertBalance.update = lambda self, norm: None


def overflow_unnoticed() -> None:
    ExpertBalance.discarded = lambda self: None
    ExpertBalance.must_repeat = lambda self, statistics: False


def changed_slots(**changes: Any) -> None:
    """Replaces attributes of all slots by functions of them."""
    inner = megads.model.moe.assign_slots

    def assign_slots(*args: Any) -> Slots:
        slots = inner(*args)
        return replace(slots, **{name: change(slots) for name, change in changes.items()})

    megads.model.moe.assign_slots = assign_slots


def padding_counted_as_tokens() -> None:
    changed_slots(filled=lambda slots: torch.ones_like(slots.filled))


def rows_beyond_the_capacity_take_the_last_slot() -> None:
    changed_slots(kept=lambda slots: torch.ones_like(slots.kept))


def slots_of_the_next_expert() -> None:
    changed_slots(slot_of_row=lambda slots: (slots.slot_of_row + 1) % len(slots.filled))


def rows_dropped_by_micro_batch() -> None:
    inner = megads.model.moe.assign_slots

    def assign_slots(chosen: Tensor, experts: int, capacity: int) -> Slots:
        return inner(chosen.flatten(0, 1)[None], experts, capacity * len(chosen))

    megads.model.moe.assign_slots = assign_slots


def capacity_in_validation() -> None:
    inner = Experts.train
    Experts.train = lambda self, mode=True: inner(self, True)


def slots_of_other_ranks_not_computed() -> None:
    inner = ExpertExchange.run_slots

    def run_slots(self: ExpertExchange, slots: Tensor, experts: int, compute: Any) -> Tensor:
        def own(rows: Tensor, counts: RowCounts) -> Tensor:
            count = counts.on_host[0]
            kept = torch.arange(len(rows)) % count < count // self._axis.size
            return compute(rows, counts) * kept[:, None]

        return inner(self, slots, experts, own)

    ExpertExchange.run_slots = run_slots
