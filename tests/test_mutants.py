"""Each known defect, applied to the running code, makes a named parity check fail; without it the check passes.

A parity test that lives through its mutant proves nothing.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

import megads.engine.bucket
import megads.engine.deepspeed_state
import megads.engine.optimizer
import megads.engine.stage_pipeline
import megads.engine.train_engine
import megads.engine.zero_engine
import megads.model.attention
import megads.model.gpt
import megads.model.mlp
import megads.parallel.loss
import megads.parallel.sharding
from megads.batch import BatchInfo, MicroBatch
from megads.engine.bucket import Bucket, WeightGathers
from megads.engine.native_engine import NativeEngine
from megads.engine.optimizer import BucketOptimizer, NamedParameter
from megads.engine.p2p import P2PCommunicator
from megads.engine.zero_engine import ZeroEngine
from megads.model.attention import Attention, AttentionCore
from megads.model.config import MLPKind, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.gpt import ParallelBlock
from megads.model.layers import Dropout
from megads.ops.config import Float8Recipe, Implementation, OpsConfig
from megads.ops.dropout import DropoutMask
from megads.ops.softmax import MaskedSoftmax
from megads.optim.config import OptimConfig
from megads.optim.groups import BucketLayout, Role
from megads.optim.masters import MasterGroup
from megads.optim.muon import FusedMatrices, MuonRule, WholeMatrices
from megads.optim.optimizers import FusedAdamW
from megads.parallel import context, loss, region_linear, sharding
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute
from megads.parallel.embedding import PositionShardEmbedding
from megads.parallel.grid import Axis, vocab_range
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.pipeline_actions import Action, ActionKind
from megads.parallel.region_linear import Region, reduce_from_tp_region
from megads.parallel.schedule import ScheduleName
from megads.parallel.sharding import RowParallelLinear
from megads.parallel.weight_gradients import DeferredWgrads, WeightGradient, linear
from megads.tools.verify.checks import check_float8
from tests import float8_defects, model_defects, moe_defects, parity, ring_defects, ulysses_defects
from tests.engine.test_float8 import scenario as float8_scenario
from tests.engine.test_model_features import MODELS as OPTIONS
from tests.engine.test_moe import LAYOUTS as EXPERT_LAYOUTS
from tests.engine.test_moe import scenario as expert_scenario
from tests.engine.test_moe import with_capacity
from tests.parity import LAYOUTS as PARITY_LAYOUTS
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

LAYOUTS = (
    PARITY_LAYOUTS
    | EXPERT_LAYOUTS
    | {
        "dp2, overlapped gathers": ParallelConfig(dp=2, bucket_elements=parity.SMALL_BUCKET, overlap_param_gather=True),
        "pp2 recomputed": ParallelConfig(pp=2, recompute=Recompute.full),
        # The rank in the middle receives gradients and puts weights' parts off beyond the next message.
        "pp3 zb_h1": ParallelConfig(pp=3, schedule=ScheduleName.zb_h1),
        "ulysses2": ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses),
        "ulysses3": ParallelConfig(cp=3, cp_kind=ContextParallelKind.ulysses),
        "ring2": ParallelConfig(cp=2, cp_kind=ContextParallelKind.ring),
        "ring3": ParallelConfig(cp=3, cp_kind=ContextParallelKind.ring),
        "ulysses2 gather2": ParallelConfig(cp=4, cp_ulysses=2),
        "ulysses2 ring2": ParallelConfig(cp=4, cp_ulysses=2, cp_kind=ContextParallelKind.ring),
    }
)


def local_alibi_slopes() -> None:
    def narrow(self: AttentionCore, rank: int, size: int) -> None:
        self.heads = range(len(self.heads) // size)

    AttentionCore.narrow = narrow


def replicated_parameters_count_on_every_rank() -> None:
    inner = BucketOptimizer._pieces_of_norm

    def pieces(self: BucketOptimizer) -> dict[Bucket, Any]:
        owned, self._owned = self._owned, {slot.member.name for b in self.buckets for slot in b.layout.slots}
        found = inner(self)
        self._owned = owned
        return found

    BucketOptimizer._pieces_of_norm = pieces


def bf16_reduction() -> None:
    def launch(self: Bucket) -> None:
        rounded = self._main_grad.bfloat16()
        out = rounded.new_empty(len(self.slice))
        # Through the module's name, which the test listens at.
        megads.engine.bucket.dist.reduce_scatter_tensor(out, rounded, group=self.data.group)
        self.gradient = out.float()

    Bucket.launch = launch


def averaged_micro_batches() -> None:
    """What DeepSpeed's own backward pass does to every loss unless it is told that there is one micro-batch."""
    inner = TokenMeanLoss.__call__

    def loss(self: TokenMeanLoss, logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        found = inner(self, logits, targets)
        # The value alone stays right.
        return found.detach() + (found - found.detach()) / 2

    TokenMeanLoss.__call__ = loss


def averaged_replicas() -> None:
    inner = Bucket.finish

    def finish(self: Bucket) -> None:
        inner(self)
        self.gradient /= self.data.size

    Bucket.finish = finish


def missing_tensor_parallel_mark() -> None:
    inner = megads.engine.stage_pipeline.materialise

    def materialise(*args: Any) -> Any:
        stage = inner(*args)
        for name, parameter in stage.named_parameters():
            if name.endswith("mlp.up.weight"):
                parameter.tensor_model_parallel = False
        return stage

    megads.engine.stage_pipeline.materialise = materialise


def bf16_reduction_of_shards() -> None:
    inner = megads.engine.zero_engine.zero_settings

    def config(*args: Any) -> Any:
        return inner(*args) | {"communication_data_type": "bf16"}

    megads.engine.zero_engine.zero_settings = config


def divided_by_the_shards_twice() -> None:
    inner = ZeroEngine.__init__

    def init(self: ZeroEngine, *args: Any) -> None:
        inner(self, *args)
        self.averaged_over = 1

    ZeroEngine.__init__ = init


def micro_batches_overwrite_each_other() -> None:
    DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag = lambda self: None


def subgroups_average_their_gradients() -> None:
    inner = ZeroEngine._compute

    def compute(self: ZeroEngine, micro_batches: Any, **overlap: bool) -> Tensor:
        total = inner(self, micro_batches, **overlap)
        self.deepspeed.reduced_gradients.div_(self.grid.replica.size)
        return total

    ZeroEngine._compute = compute


def tied_sum_before_data_parallel_reduce() -> None:
    """DeepSpeed's order, with the tied embedding among the other matrices as there."""
    make, reduce = BucketOptimizer._make_buckets, BucketOptimizer.reduce
    pairs: dict[int, Any] = {}

    def make_buckets(self: BucketOptimizer, parameters: list[NamedParameter], *settings: Any) -> list[Bucket]:
        pairs.update({id(p.parameter): p.pair for p in parameters if p.pair is not None})
        return make(self, [replace(p, pair=None) for p in parameters], *settings)

    def reduce_all(self: BucketOptimizer) -> None:
        for bucket in self.buckets:
            for slot, same in zip(bucket.layout.slots, bucket.copies, strict=True):
                if id(same[0]) in pairs:
                    dist.all_reduce(bucket._main_grad[slot.start : slot.stop], group=pairs[id(same[0])])
        reduce(self)

    BucketOptimizer._make_buckets, BucketOptimizer.reduce = make_buckets, reduce_all
    BucketOptimizer._launch_complete = lambda self: None


def bucket_launched_before_its_last_gradient() -> None:
    inner = Bucket.begin

    def begin(self: Bucket) -> None:
        inner(self)
        self.missing -= 1

    Bucket.begin = begin


def buckets_launched_in_the_first_backward() -> None:
    inner = BucketOptimizer._on_gradient

    def on_gradient(self: BucketOptimizer, *args: Any) -> None:
        self.last_backward = True
        inner(self, *args)

    BucketOptimizer._on_gradient = on_gradient


def slice_of_the_wrong_rank() -> None:
    inner = BucketLayout.slice_of
    BucketLayout.slice_of = lambda self, rank, ranks: inner(self, (rank + 1) % ranks, ranks)


def no_backward_all_reduce_of_column_layers() -> None:
    def column_parallel_linear(x: Tensor, weight: Any, bias: Any, _region: Any, gradients: Any) -> Tensor:
        return linear(x, weight, bias, gradients)

    megads.parallel.sharding.column_parallel_linear = column_parallel_linear


def row_bias_on_every_rank() -> None:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return reduce_from_tp_region(F.linear(x, self.weight, self.bias), self.region.axis)

    RowParallelLinear.forward = forward


def padding_in_the_softmax() -> None:
    inner = loss.vocab_parallel_token_losses

    def losses(logits: Tensor, labels: Tensor, vocab_size: int, axis: Any, z_loss: float) -> Tensor:
        return inner(logits, labels, logits.shape[-1] * axis.size, axis, z_loss)

    megads.parallel.loss.vocab_parallel_token_losses = losses


def z_loss_of_own_rows() -> None:
    inner = loss._probabilities_

    def probabilities(logits: Tensor, labels: Tensor, vocab_size: int, axis: Any) -> tuple[Tensor, ...]:
        own = logits[..., : vocab_range(vocab_size, axis, logits.shape[-1])[1]].logsumexp(-1)
        return *inner(logits, labels, vocab_size, axis)[:-1], own

    loss._probabilities_ = probabilities


def input_gradients_of_chunks_stay_local() -> None:
    done = SimpleNamespace(wait=lambda: None)

    def all_reduce(x: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return done if async_op else dist.all_reduce(x, *args, **kwargs)

    loss.dist = SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce})


def weight_gradients_of_chunks_overwrite_each_other() -> None:
    inner = WeightGradient.add_to
    WeightGradient.add_to = lambda self, sums, first: inner(self, sums, True)


def heads_of_dropout_counted_from_the_rank() -> None:
    inner = DropoutMask.keep
    DropoutMask.keep = lambda self, *where: inner(replace(self, first_head=0), *where)


def samples_of_dropout_counted_in_the_micro_batch() -> None:
    inner = DropoutMask.keep
    DropoutMask.keep = lambda self, *where: inner(replace(self, samples_b=torch.arange(len(self.samples_b))), *where)


def queries_of_dropout_counted_from_the_rank() -> None:
    inner = DropoutMask.keep
    DropoutMask.keep = lambda self, heads, places, keys: inner(self, heads, torch.arange(len(places)), keys)


def clipping_skipped_on_higher_ranks() -> None:
    inner = BucketOptimizer._update

    def update(self: BucketOptimizer, learning_rate: float) -> None:
        self._clip = self._clip if self._grid.tp.is_first else 0.0
        inner(self, learning_rate)

    BucketOptimizer._update = update


def mean_of_micro_batch_means() -> None:
    inner = TokenMeanLoss.__call__

    def loss(self: TokenMeanLoss, logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        self.scale = 1.0 / targets[1].sum().double()
        return inner(self, logits, targets)

    TokenMeanLoss.__call__ = loss


def embedding_norm_decays() -> None:
    inner = megads.engine.optimizer.parameter_role

    def role(name: str, tied: bool = False, **which: bool) -> Role:
        return Role.decay if name.startswith("embedding.norm") else inner(name, tied, **which)

    megads.engine.optimizer.parameter_role = role


def no_sum_of_partial_gradients() -> None:
    inner = megads.engine.stage_pipeline.materialise

    def materialise(*args: Any) -> Any:
        stage = inner(*args)
        for parameter in stage.parameters():
            parameter.gradient_partial = False
        return stage

    megads.engine.stage_pipeline.materialise = materialise


def parts_of_tokens_out_of_order() -> None:
    inner = Region.parts
    Region.parts = lambda self, tokens: inner(self, tokens)[:1] + inner(self, tokens)[:0:-1]


def own_slice_for_a_reduce_scatter() -> None:
    def start_scatter(x: Tensor, axis: Axis) -> region_linear.Pending:
        own = x.chunk(axis.size, dim=1)[axis.rank].contiguous()
        return lambda: own

    region_linear.start_scatter = start_scatter


def dropout_of_the_first_shard_everywhere() -> None:
    inner = megads.engine.stage_pipeline.shard_layer

    def shard_layer(*args: Any, **kwargs: Any) -> Any:
        stage, placements = inner(*args, **kwargs)
        for module in stage.modules():
            if isinstance(module, Dropout):
                module.shard = (0, module.shard[1])
        return stage, placements

    megads.engine.stage_pipeline.shard_layer = shard_layer


def positions_from_zero_on_every_shard() -> None:
    def forward(self: PositionShardEmbedding, positions: Tensor) -> Tensor:
        return F.embedding(positions.narrow(-1, 0, positions.shape[-1] // self.axis.size), self.weight)

    PositionShardEmbedding.forward = forward


def recomputation_of_the_latest_micro_batch() -> None:
    inner = megads.engine.stage_pipeline.recompute_module

    def recompute_module(block: Any) -> None:
        def forward(hidden: Tensor, _info: Any, *, original: Any = block.forward) -> Tensor:
            return original(hidden, latest[0])

        block.forward = forward
        inner(block)

    latest: list[Any] = []
    begin = NativeEngine._HANDLERS[ActionKind.forward]

    def forward_pass(self: NativeEngine, micro_batch: int, stage: int) -> None:
        latest[:] = [self._micro_batches[micro_batch].info]
        begin(self, micro_batch, stage)

    megads.engine.stage_pipeline.recompute_module = recompute_module
    NativeEngine._HANDLERS |= {ActionKind.forward: forward_pass}


def dropout_redrawn_in_recomputation() -> None:
    inner = Dropout.mask
    drawn = set()

    def mask(self: Dropout, info: Any, *where: Any) -> DropoutMask:
        found, key = inner(self, info, *where), (self.site, *info.sample_ids.tolist())
        again = key in drawn
        drawn.add(key)
        return replace(found, key=found.key + again)

    Dropout.mask = mask


def a_weight_part_dropped() -> None:
    inner = DeferredWgrads.compute

    def compute(self: DeferredWgrads, main_grads: Any) -> None:
        self._deferred.pop()
        inner(self, main_grads)

    DeferredWgrads.compute = compute


def weight_parts_of_the_last_micro_batch_lost() -> None:
    inner = NativeEngine._HANDLERS[ActionKind.backward_weight]

    def backward_weight(self: NativeEngine, micro_batch: int, stage: int) -> None:
        if micro_batch < len(self._micro_batches) - 1:
            inner(self, micro_batch, stage)

    NativeEngine._HANDLERS |= {ActionKind.backward_weight: backward_weight}


def buffer_given_back_after_the_forward_pass() -> None:
    inner = NativeEngine._run_forward

    def run_forward(self: NativeEngine, micro_batch: int, stage: int, hidden: Tensor, buffer: Tensor | None) -> None:
        inner(self, micro_batch, stage, hidden, None)
        if buffer is not None:
            self._p2p.release(buffer)

    NativeEngine._run_forward = run_forward


def buffers_given_back_before_the_weight_part() -> None:
    inner = NativeEngine._run_backward

    def run_backward(self: NativeEngine, *args: Any) -> list[Tensor]:
        for buffer in inner(self, *args):
            self._p2p.release(buffer)
        return []

    NativeEngine._run_backward = run_backward


def messages_received_in_another_order() -> None:
    """A tensor that arrives while another one is not used yet changes places with it."""
    inner = P2PCommunicator.post

    def post(self: P2PCommunicator, action: Action) -> None:
        early = list(self._arriving)
        inner(self, action)
        if early:
            self._arriving[action], self._arriving[early[-1]] = self._arriving[early[-1]], self._arriving[action]

    P2PCommunicator.post = post


def gradients_reduced_with_the_first_virtual_stage() -> None:
    """The last backward pass of any stage ends the step's, as if each rank had one stage."""
    inner = NativeEngine._note_last

    def note_last(self: NativeEngine, micro_batch: int) -> None:
        inner(self, micro_batch)
        if self.optimizer.last_backward:
            for bucket in self.optimizer.buckets:
                bucket.missing = min(bucket.missing, 1)

    NativeEngine._note_last = note_last


def bias_of_the_second_chunk_dropped() -> None:
    inner = AttentionCore.bias

    def bias(self: AttentionCore, info: BatchInfo, num_keys: int, *args: Any) -> Tensor:
        found = inner(self, info, num_keys, *args)
        half = found.shape[2] // 2
        late = found[:, :, half:]
        return torch.cat([found[:, :, :half], torch.zeros_like(late).masked_fill(late.isinf(), -torch.inf)], dim=2)

    AttentionCore.bias = bias


def keys_and_values_in_rank_order() -> None:
    context._in_sample_order = lambda by_rank: torch.cat(by_rank.unbind(), dim=-2)


def key_and_value_gradients_not_summed_over_context() -> None:
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor, None]:
        own_k, own_v = context._by_rank((grad_k, grad_v), ctx.axis.size, grad_k.dtype)[ctx.axis.rank]
        return own_k, own_v, None

    context._GatherSequence.backward = staticmethod(backward)


def cut_changed(change: Callable[[MicroBatch, MicroBatch], MicroBatch]) -> None:
    inner = context.shard_micro_batch
    megads.engine.train_engine.shard_micro_batch = lambda batch, *args: change(batch, inner(batch, *args))


def document_mask_local_to_the_chunk() -> None:
    def change(whole: MicroBatch, cut: MicroBatch) -> MicroBatch:
        half = cut.info.document_starts.shape[1] // 2
        first_places = cut.info.sequence_index[[0, half]].repeat_interleave(half)
        starts = torch.maximum(cut.info.document_starts, first_places)
        return replace(cut, info=replace(cut.info, document_starts=starts))

    cut_changed(change)


def document_mask_lost() -> None:
    cut_changed(lambda whole, cut: replace(cut, info=replace(cut.info, document_starts=None)))


def restarted_positions_ignored() -> None:
    cut_changed(lambda whole, cut: replace(cut, info=replace(cut.info, position_ids_bs=None)))


def positions_counted_from_the_rank() -> None:
    def change(whole: MicroBatch, cut: MicroBatch) -> MicroBatch:
        local = torch.arange(cut.tokens_bs.shape[1]).expand_as(cut.tokens_bs)
        return replace(cut, info=replace(cut.info, position_ids_bs=local))

    cut_changed(change)


def tokens_summed_over_data_parallel_only() -> None:
    inner = megads.engine.train_engine.global_tokens
    megads.engine.train_engine.global_tokens = lambda batches, grid, *where: inner(
        batches, replace(grid, data=grid.dp), *where
    )


def dropout_of_local_places() -> None:
    Dropout._places = lambda self, x, info: None


def query_heads_deal_the_keys_out() -> None:
    """Head i reads the keys of head i modulo their number: neighbours should share."""
    inner = megads.model.attention.masked_attention

    def masked_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return inner(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), bias)

    megads.model.attention.masked_attention = masked_attention


def key_gradients_of_one_query_head() -> None:
    inner = megads.model.attention.masked_attention

    def masked_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (torch.stack([x, *[x.detach()] * (group - 1)], dim=2).flatten(1, 2) for x in (k, v))
        return inner(q, k, v, bias)

    megads.model.attention.masked_attention = masked_attention


def shared_key_gradients_of_one_rank() -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, shared = grad.split((ctx.divided, grad.shape[-1] - ctx.divided), dim=-1)
        part = shared.chunk(len(ctx.sharers), dim=-1)[ctx.axis.rank - ctx.sharers.start]
        return torch.cat((own, part), dim=-1), None, None, None

    megads.parallel.region_linear._GatherShared.backward = staticmethod(backward)


def queries_keys_and_values_apart() -> None:
    """All queries, then all keys, then all values; the same where a rank has one head of keys."""

    def parts(self: Attention, qkv: Tensor, info: BatchInfo) -> tuple[Tensor, ...]:
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        groups = heads.shape[2] // (self.queries_per_kv + 2)
        return heads.split((self.queries_per_kv * groups, groups, groups), dim=2)

    Attention.heads = parts


def window_one_token_too_long() -> None:
    inner = AttentionCore.__init__

    def init(self: AttentionCore, *args: Any) -> None:
        inner(self, *args)
        self.window += 1

    AttentionCore.__init__ = init


def norm_of_the_own_heads() -> None:
    """The queries of a rank's own heads are normed as if they were all."""
    sharding._sums_over_ranks = lambda parts, axis: torch.stack(list(parts)) * axis.size


def gradient_of_the_norm_of_the_own_heads() -> None:
    """Forward the sum is that of all ranks, backward it is not."""
    inner = sharding._CutRMSNorms.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums, sharding._sums_over_ranks = sharding._sums_over_ranks, lambda parts, axis: torch.stack(list(parts))
        try:
            return inner(ctx, *grads)
        finally:
            sharding._sums_over_ranks = sums

    sharding._CutRMSNorms.backward = staticmethod(backward)


def window_of_local_places() -> None:
    """A query's window ends at its number among the tokens of its rank."""
    inner = AttentionCore.bias

    def bias(self: AttentionCore, *args: Any) -> Tensor:
        window, self.window = self.window, None
        found = inner(self, *args)
        self.window = window
        queries, keys = (torch.arange(size) for size in found.shape[-2:])
        return found.masked_fill(keys <= queries[:, None] - window, -1e9)

    AttentionCore.bias = bias


def gates_before_ups() -> None:
    """The first half of a rank's columns as gates: on another rank lie those that they belong to."""

    def swiglu(gate_up: Tensor, kernels: Any) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    megads.model.mlp.swiglu = swiglu


def mlp_reads_what_attention_added() -> None:
    def forward(self: ParallelBlock, hidden: Tensor, info: BatchInfo) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), info)
        return hidden + self.mlp(self.input_norm(hidden))

    ParallelBlock.forward = forward


def owners_orthogonalise_their_own_piece() -> None:
    """Every ZeRO rank takes the piece of a matrix that it updates for the matrix, as DeepSpeed did."""
    inner = WholeMatrices.__init__

    def init(self: WholeMatrices, *args: Any) -> None:
        inner(self, *args)
        self.parameters = [replace(owned, data=self._group.data.rank) for owned in self.parameters]

    def over_data(self: WholeMatrices, runs: list[Tensor]) -> dict[int, Tensor]:
        pieces = [run.new_zeros(owned.run.local_elements) for owned, run in zip(self.parameters, runs, strict=True)]
        for owned, piece, run in zip(self.parameters, pieces, runs, strict=True):
            piece[owned.run.first :][: len(run)] = run
        return dict(enumerate(pieces))

    def back_over_data(self: WholeMatrices, shares: dict[int, Tensor]) -> list[Tensor]:
        return [shares[n].narrow(0, owned.run.first, owned.run.length) for n, owned in enumerate(self.parameters)]

    WholeMatrices.__init__ = init
    WholeMatrices._over_data, WholeMatrices._back_over_data = over_data, back_over_data


def tensor_parallel_shares_orthogonalised() -> None:
    """Every tensor-parallel rank takes its share of a matrix for the matrix."""
    inner = WholeMatrices.__init__

    def init(self: WholeMatrices, *args: Any) -> None:
        inner(self, *args)
        self.parameters = [replace(owned, tp=self._group.tp.rank) for owned in self.parameters]

    def over_tp(self: WholeMatrices, shares: dict[int, Tensor]) -> dict[int, Tensor]:
        return {number: share.view(self.parameters[number].run.local_shape) for number, share in shares.items()}

    WholeMatrices.__init__, WholeMatrices._over_tp = init, over_tp
    WholeMatrices._back_over_tp = lambda self, whole: {number: share.flatten() for number, share in whole.items()}


def matrices_of_one_parameter_as_one() -> None:
    """Queries, keys and values, or gates and ups, share their singular values."""
    FusedMatrices.split = lambda self, name, whole: [whole]
    FusedMatrices.join = lambda self, name, matrices: matrices[0]


def pieces_of_a_matrix_out_of_order() -> None:
    """An owner puts the pieces of a matrix together in another order than it was cut in."""
    inner = WholeMatrices._over_data

    def over_data(self: WholeMatrices, runs: list[Tensor]) -> dict[int, Tensor]:
        shares = inner(self, runs)
        return {number: share.roll(self.parameters[number].held[0][1]) for number, share in shares.items()}

    WholeMatrices._over_data = over_data


def trust_ratio_of_a_part() -> None:
    """LAMB's norms are those of what a rank holds of a parameter."""
    MasterGroup.total = lambda self, own: own


def average_begins_at_zero() -> None:
    """A running average without the weights that it starts from, as one that is not corrected for its start."""
    for module in (megads.engine.optimizer, megads.engine.deepspeed_state):
        inner, seen = module.update_average, set[int]()

        def update(average: Tensor, *args: Any, inner: Any = inner, seen: set[int] = seen) -> None:
            if id(average) not in seen:
                seen.add(id(average))
                average.zero_()
            inner(average, *args)

        module.update_average = update


def average_with_its_share_for_its_decay() -> None:
    for module in (megads.engine.optimizer, megads.engine.deepspeed_state):
        inner = module.update_average
        module.update_average = lambda a, m, decay, *rest, inner=inner: inner(a, m, 1.0 - decay, *rest)


def slope_of_the_cap_left_out_in_chunks() -> None:
    inner = loss.softcap_
    loss.softcap_ = lambda logits, cap: torch.ones_like(inner(logits, cap))


def cap_after_the_bias() -> None:
    """Scores are capped with ALiBi's bias, which bounds the bias, too."""

    def capped(self: MaskedSoftmax, scores_bnst: Tensor) -> Tensor:
        assert self.bias is not None
        return torch.softmax(1.5 * torch.tanh((scores_bnst.mul(self.scale) + self.bias()) / 1.5), dim=-1)

    MaskedSoftmax.__call__ = capped


def momentum_without_nesterov() -> None:
    MuonRule._direction = lambda self, update: update.state["momentum_buffer"].lerp_(
        update.grad, 1.0 - self._options.momentum
    )


def loss_of_gathered_logits() -> None:
    """Every rank has all logits, and the sum over ranks counts each of them on every one: loss + log(tp)."""
    inner = loss._probabilities_

    def probabilities(logits: Tensor, labels: Tensor, vocab_size: int, axis: Any) -> tuple[Tensor, ...]:
        losses, shares, local, foreign, log_z = inner(logits, labels, vocab_size, axis)
        more = math.log(axis.size)
        return losses + more, shares / axis.size, local, foreign, log_z + more

    loss._probabilities_ = probabilities


def sinks_of_the_first_rank_in_the_norm() -> None:
    inner = BucketOptimizer._pieces_of_norm

    def pieces(self: BucketOptimizer) -> dict[Bucket, Any]:
        owned = self._owned
        if not self._grid.tp.is_first:
            self._owned = {name for name in owned if not name.endswith("attention.sinks.weight")}
        found = inner(self)
        self._owned = owned
        return found

    BucketOptimizer._pieces_of_norm = pieces


def layers_that_do_not_wait() -> None:
    WeightGathers.wait = lambda self, layer: None


def layers_that_wait_for_the_one_before() -> None:
    """The gathers are started in time, but a layer may read its weights before they have arrived."""
    inner = WeightGathers.wait

    def wait(self: WeightGathers, layer: torch.nn.Module) -> None:
        layers = list(self._needed)
        inner(self, layers[max(0, layers.index(layer) - 1)])

    WeightGathers.wait = wait


def weights_gathered_before_the_update() -> None:
    inner = BucketOptimizer._update

    def update(self: BucketOptimizer, learning_rate: float) -> None:
        begin = WeightGathers.begin
        begin(self._gathers)
        self.finish_gathers()
        WeightGathers.begin = lambda _: None
        inner(self, learning_rate)
        WeightGathers.begin = begin

    BucketOptimizer._update = update


def norm_of_the_own_stage() -> None:
    """Each stage of a pipeline without other axes clips by the norm of its own gradients."""

    def norm(self: BucketOptimizer, added: Tensor | None = None) -> Tensor:
        return torch.stack([self.norm * 0, *(bucket.gradient.double().norm() for bucket in self.buckets)]).norm()

    BucketOptimizer.global_norm = norm


def mean_of_the_ranks_own_means() -> None:
    """Every rank divides by its own tokens, and the ranks' losses are averaged as if all had as many."""

    def own_tokens(batches: Any, grid: Any, device: Any, *where: int) -> Tensor:
        alone = replace(grid, data=SimpleNamespace(size=1))
        return inner(batches, alone, device, *where) * grid.data.size

    inner = megads.engine.train_engine.global_tokens
    megads.engine.train_engine.global_tokens = own_tokens


def blocks_numbered_from_the_stage() -> None:
    inner = megads.engine.stage_pipeline.materialise

    def materialise(stage: Any, placements: Any, value: Any, device: Any) -> Any:
        first = 0 if dist.get_rank() == 0 else 2  # of pp2, whose last stage has block 2 alone

        def local(name: str, shape: tuple[int, ...]) -> Tensor:
            return value(re.sub(r"blocks\.(\d+)", lambda found: f"blocks.{int(found[1]) - first}", name), shape)

        return inner(stage, placements, local, device)

    megads.engine.stage_pipeline.materialise = materialise


def a_step_counted_before_the_first() -> None:
    """As when zero gradients are stepped on to make the optimizer's state: other corrections of the moments."""
    inner = FusedAdamW.__init__

    def init(self: FusedAdamW, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self.set_steps(1)

    FusedAdamW.__init__ = init


PACKED = scenario_with(masked=True, documents=True)
PACKED_LEARNED = replace(PACKED, model=replace(MODEL, position=Position.learned))
ROPE = scenario_with(model=replace(MODEL, position=Position.rope))
FEATURES = scenario_with(
    model=replace(
        MODEL, num_kv_heads=2, window=5, mlp=MLPKind.swiglu, norm=NormKind.rmsnorm, parallel_block=True, qk_norm=True
    )
)
MULTI_QUERY = scenario_with(model=replace(MODEL, num_kv_heads=1))
OLMO2 = scenario_with(
    model=replace(
        MODEL,
        num_kv_heads=2,
        norm=NormKind.rmsnorm,
        norm_placement=NormPlacement.output,
        position=Position.rope,
        qk_norm=True,
        qk_norm_width=QKNormWidth.full,
    )
)


@dataclass(frozen=True)
class Case:
    """A defect, the layout and scenario in which it shows, and the check that must see it."""

    defect: Callable[[], None]
    layout: str
    check: Callable[[Run, Run], list[str]]
    scenario: Scenario = field(default_factory=Scenario)


# Hidden dropout has the masks of the unsharded model in every layout.
SHARDED_SEQUENCE = scenario_with(model=replace(parity.MODEL, position=Position.learned, hidden_dropout=0.2))

MUON = scenario_with(steps=3, optimizer=OptimConfig(name="muon"))
# Its steps are a share of the weight; parts of random weights have ratios that differ little from the whole's.
LAMB = scenario_with(steps=3, lr=2e-2, optimizer=OptimConfig(name="lamb"))
CAPPED = scenario_with(
    ops=OpsConfig(Implementation.torch, loss_chunk=9),
    model=replace(MODEL, attention_logit_softcap=1.5, final_logit_softcap=2.0),
)
SINKS = scenario_with(model=replace(MODEL, attention_sinks=True))
GEMMA3, PYTHIA, GPT_J, GRANITE, OLMO1, OPT, PHI3, SMOLLM3 = (
    scenario_with(model=replace(MODEL, **OPTIONS[name]))
    for name in ("gemma3", "pythia", "gpt-j", "granite", "olmo1", "opt", "phi3 128k", "smollm3")
)
EMA = scenario_with(steps=3, optimizer=OptimConfig(ema_decay=0.6))
MIXTRAL, OLMOE, DEEPSEEK = (expert_scenario(name, steps=2) for name in ("mixtral", "olmoe", "deepseek"))
OVERFLOWING, DROPPING = (replace(with_capacity("mixtral", name), steps=2) for name in ("recompute", "drop"))
FP8, FP8_ROWS = (float8_scenario("llama", recipe) for recipe in (Float8Recipe.tensorwise, Float8Recipe.rowwise))
FP8_BRANCHES = float8_scenario("parallel block", Float8Recipe.tensorwise)
GATED_MUON = replace(MUON, model=FEATURES.model)
CHUNKS = scenario_with(ops=OpsConfig(Implementation.torch, loss_chunk=9))
DROPOUT = scenario_with(model=replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1))
SHORT = scenario_with(steps=3)
CASES = [
    Case(layers_that_do_not_wait, "dp2, overlapped gathers", parity.check_curve, SHORT),
    Case(layers_that_wait_for_the_one_before, "dp2, overlapped gathers", parity.check_curve, SHORT),
    Case(weights_gathered_before_the_update, "dp2, overlapped gathers", parity.check_curve, SHORT),
    Case(local_alibi_slopes, "tp2", parity.check_first_step),
    Case(replicated_parameters_count_on_every_rank, "tp2", parity.check_first_step),
    Case(bf16_reduction, "dp2", parity.check_reduction_dtype),
    Case(averaged_micro_batches, "pp2", parity.check_first_step),
    Case(averaged_replicas, "dp2", parity.check_first_step),
    Case(missing_tensor_parallel_mark, "zero2tp2dp2", parity.check_first_step),
    Case(bf16_reduction_of_shards, "zero2dp2", parity.check_reduction_dtype),
    Case(bf16_reduction_of_shards, "zero3dp2", parity.check_reduction_dtype),
    Case(divided_by_the_shards_twice, "zero3dp2", parity.check_first_step),
    Case(micro_batches_overwrite_each_other, "zero3dp2", parity.check_first_step),
    Case(subgroups_average_their_gradients, "hierarchical", parity.check_first_step),
    Case(tied_sum_before_data_parallel_reduce, "pp2dp3", parity.check_replicas, scenario_with(steps=10)),
    Case(bucket_launched_before_its_last_gradient, "dp2", parity.check_first_step),
    Case(buckets_launched_in_the_first_backward, "dp2", parity.check_first_step),
    Case(slice_of_the_wrong_rank, "dp2", parity.check_first_step),
    Case(no_backward_all_reduce_of_column_layers, "tp2", parity.check_first_step),
    Case(row_bias_on_every_rank, "tp2", parity.check_first_step),
    Case(padding_in_the_softmax, "tp2", parity.check_first_step),
    Case(z_loss_of_own_rows, "tp2", parity.check_first_step, scenario_with(z_loss=0.1)),
    Case(input_gradients_of_chunks_stay_local, "tp2", parity.check_first_step, CHUNKS),
    Case(weight_gradients_of_chunks_overwrite_each_other, "tp2", parity.check_first_step, CHUNKS),
    Case(heads_of_dropout_counted_from_the_rank, "tp2", parity.check_first_step, DROPOUT),
    Case(samples_of_dropout_counted_in_the_micro_batch, "dp2", parity.check_first_step, DROPOUT),
    Case(queries_of_dropout_counted_from_the_rank, "cp2", parity.check_first_step, DROPOUT),
    Case(clipping_skipped_on_higher_ranks, "tp2", parity.check_replicas),
    Case(mean_of_micro_batch_means, "dp2", parity.check_first_step, scenario_with(masked=True)),
    Case(no_sum_of_partial_gradients, "tp2sp", parity.check_first_step),
    Case(no_sum_of_partial_gradients, "tp2", parity.check_first_step, FEATURES),
    Case(parts_of_tokens_out_of_order, "tp2dp2sp", parity.check_first_step),
    Case(own_slice_for_a_reduce_scatter, "tp2sp", parity.check_first_step),
    Case(dropout_of_the_first_shard_everywhere, "tp2sp", parity.check_first_step, SHARDED_SEQUENCE),
    Case(positions_from_zero_on_every_shard, "tp2sp", parity.check_first_step, SHARDED_SEQUENCE),
    Case(embedding_norm_decays, "single", parity.check_curve, scenario_with(steps=5)),
    Case(recomputation_of_the_latest_micro_batch, "pp2 recomputed", parity.check_first_step, DROPOUT),
    Case(dropout_redrawn_in_recomputation, "pp2 recomputed", parity.check_first_step, DROPOUT),
    Case(a_weight_part_dropped, "pp2 zb_h1", parity.check_first_step),
    Case(weight_parts_of_the_last_micro_batch_lost, "pp2 zb_h1", parity.check_first_step),
    Case(buffer_given_back_after_the_forward_pass, "pp2 interleaved", parity.check_first_step),
    Case(buffers_given_back_before_the_weight_part, "pp3 zb_h1", parity.check_first_step),
    Case(messages_received_in_another_order, "pp2 interleaved", parity.check_first_step),
    Case(gradients_reduced_with_the_first_virtual_stage, "pp2dp2 dualpipe_v", parity.check_first_step),
    Case(bias_of_the_second_chunk_dropped, "cp2", parity.check_first_step),
    Case(keys_and_values_in_rank_order, "cp2", parity.check_first_step),
    Case(key_and_value_gradients_not_summed_over_context, "cp2", parity.check_first_step),
    Case(keys_and_values_in_rank_order, "ulysses2", parity.check_first_step),
    Case(ulysses_defects.heads_dealt_out_to_the_ranks, "ulysses2", parity.check_first_step),
    Case(ulysses_defects.every_rank_takes_the_first_heads_for_its_own, "ulysses3", parity.check_first_step),
    Case(ulysses_defects.windows_counted_from_the_start_of_a_rank, "ulysses2", parity.check_first_step, FEATURES),
    Case(ulysses_defects.documents_of_whole_samples_lost, "ulysses2", parity.check_first_step, PACKED),
    Case(ulysses_defects.gradients_of_one_copy_of_a_kv_head, "ulysses3", parity.check_first_step, FEATURES),
    Case(ulysses_defects.copies_of_kv_heads_apart, "ulysses3", parity.check_first_step, FEATURES),
    Case(ulysses_defects.sinks_of_the_first_rank, "ulysses2", parity.check_first_step, SINKS),
    Case(heads_of_dropout_counted_from_the_rank, "ulysses2", parity.check_first_step, DROPOUT),
    Case(ring_defects.keys_of_the_next_rank, "ring3", parity.check_first_step),
    Case(ring_defects.parts_added_without_their_weights, "ring2", parity.check_first_step),
    Case(ring_defects.windows_counted_from_the_start_of_a_block, "ring2", parity.check_first_step, FEATURES),
    Case(ring_defects.windows_ignored_by_what_is_sent, "ring3", parity.check_first_step, FEATURES),
    Case(ring_defects.windows_ignored_by_what_is_sent, "cp3", parity.check_first_step, FEATURES),
    Case(ring_defects.gradients_of_windows_stay, "cp2", parity.check_first_step, FEATURES),
    Case(ring_defects.gradients_returned_to_the_next_rank, "ring3", parity.check_first_step),
    Case(ring_defects.gradients_of_one_block_alone, "ring2", parity.check_first_step),
    Case(ring_defects.dropout_of_each_block, "ring2", parity.check_first_step, DROPOUT),
    Case(ring_defects.sinks_in_every_block, "ring2", parity.check_first_step, SINKS),
    Case(keys_and_values_in_rank_order, "ulysses2 ring2", parity.check_first_step),
    Case(ulysses_defects.subgroups_with_a_stride, "ulysses2 ring2", parity.check_first_step),
    Case(ulysses_defects.positions_counted_in_a_subgroup, "ulysses2 gather2", parity.check_first_step),
    Case(ulysses_defects.every_rank_takes_the_first_heads_for_its_own, "ulysses2 gather2", parity.check_first_step),
    Case(tokens_summed_over_data_parallel_only, "cp2", parity.check_first_step, scenario_with(masked=True)),
    Case(positions_counted_from_the_rank, "cp2", parity.check_first_step, ROPE),
    Case(dropout_of_local_places, "cp2", parity.check_first_step, DROPOUT),
    Case(document_mask_local_to_the_chunk, "cp2", parity.check_first_step, PACKED),
    Case(document_mask_lost, "pp2", parity.check_first_step, PACKED),
    Case(restarted_positions_ignored, "cp2", parity.check_first_step, PACKED_LEARNED),
    Case(query_heads_deal_the_keys_out, "pp2", parity.check_first_step, FEATURES),
    Case(key_gradients_of_one_query_head, "tp2", parity.check_first_step, FEATURES),
    Case(shared_key_gradients_of_one_rank, "tp2", parity.check_first_step, MULTI_QUERY),
    Case(queries_keys_and_values_apart, "pp2", parity.check_first_step, FEATURES),
    Case(window_one_token_too_long, "pp2", parity.check_first_step, FEATURES),
    Case(window_of_local_places, "cp2", parity.check_first_step, FEATURES),
    Case(gates_before_ups, "tp2", parity.check_first_step, FEATURES),
    Case(mlp_reads_what_attention_added, "pp2", parity.check_first_step, FEATURES),
    Case(moe_defects.experts_reduced_over_all_data_ranks, "ep2dp2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.experts_not_reduced, "ep2dp2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.experts_in_reverse_order, "ep2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.a_row_returned_twice, "ep2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.rows_above_capacity_dropped, "ep2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.weights_include_the_bias, "ep2", parity.check_first_step, DEEPSEEK),
    Case(moe_defects.normalized_before_the_choice, "ep2", parity.check_first_step, MIXTRAL),
    Case(moe_defects.groups_of_the_first_experts, "ep2", parity.check_first_step, DEEPSEEK),
    Case(moe_defects.counts_of_the_last_micro_batch, "ep2", parity.check_curve, DEEPSEEK),
    Case(moe_defects.counts_of_one_rank, "ep2", parity.check_curve, DEEPSEEK),
    Case(moe_defects.recomputed_tokens_counted_twice, "ep2 recompute", parity.check_curve, MIXTRAL),
    Case(moe_defects.balance_losses_of_each_micro_batch, "ep2", parity.check_first_step, OLMOE),
    Case(moe_defects.sequences_balanced_on_each_rank, "cp2ep2", parity.check_first_step, OLMOE),
    Case(moe_defects.weights_outside_of_the_region, "tp2", parity.check_first_step, OLMOE),
    Case(moe_defects.routers_gradient_of_one_shard, "tp2sp", parity.check_first_step, OLMOE),
    Case(moe_defects.load_of_the_first_step_kept, "ep2", parity.check_curve, MIXTRAL),
    Case(moe_defects.overflow_unnoticed, "ep2", parity.check_curve, OVERFLOWING),
    Case(moe_defects.padding_counted_as_tokens, "ep2", parity.check_first_step, DROPPING),
    Case(moe_defects.rows_beyond_the_capacity_take_the_last_slot, "ep2", parity.check_first_step, DROPPING),
    Case(moe_defects.slots_of_the_next_expert, "ep2", parity.check_first_step, DROPPING),
    Case(moe_defects.rows_dropped_by_micro_batch, "ep2", parity.check_first_step, DROPPING),
    Case(moe_defects.capacity_in_validation, "ep2", parity.check_validation, DROPPING),
    Case(moe_defects.slots_of_other_ranks_not_computed, "ep2", parity.check_first_step, DROPPING),
    Case(float8_defects.a_scale_of_each_tensor_parallel_rank, "tp2", check_float8, FP8),
    Case(float8_defects.a_scale_of_each_tensor_parallel_rank, "tp2", check_float8, FP8_ROWS),
    Case(float8_defects.a_scale_of_each_share_of_a_sequence, "tp2sp", check_float8, FP8),
    Case(float8_defects.scales_of_this_ranks_tokens, "tp2sp", check_float8, FP8_ROWS),
    Case(float8_defects.a_scale_of_both_branches, "tp2", check_float8, FP8_BRANCHES),
    Case(float8_defects.a_scale_of_each_part_of_a_weight, "tp2", check_float8, FP8),
    Case(float8_defects.a_scale_of_each_context_parallel_rank, "cp2", check_float8, FP8),
    Case(float8_defects.a_scale_of_the_previous_step, "single", parity.check_curve, FP8),
    Case(float8_defects.a_scale_of_the_micro_batch, "single", check_float8, FP8),
    Case(float8_defects.activations_in_the_format_of_gradients, "tp2", parity.check_first_step, FP8),
    Case(float8_defects.gradients_in_the_format_of_activations, "tp2", parity.check_first_step, FP8),
    Case(float8_defects.weights_of_the_first_step, "single", parity.check_curve, FP8),
    Case(model_defects.layers_counted_from_the_stage, "pp2", parity.check_first_step, GEMMA3),
    Case(model_defects.windows_of_layers_ignored, "cp2", parity.check_first_step, GEMMA3),
    Case(model_defects.bases_of_layers_ignored, "tp2", parity.check_first_step, GEMMA3),
    Case(model_defects.layers_without_positions_rotated, "tp2", parity.check_first_step, SMOLLM3),
    Case(model_defects.frequencies_of_the_whole_head, "tp2", parity.check_first_step, PYTHIA),
    Case(model_defects.rope_scaled_by_the_tokens_of_the_rank, "cp2", parity.check_first_step, PHI3),
    Case(model_defects.adjacent_features_taken_for_halves, "cp2", parity.check_first_step, GPT_J),
    Case(model_defects.mlp_reads_the_first_norm, "tp2", parity.check_first_step, PYTHIA),
    Case(model_defects.inputs_not_normed, "tp2", parity.check_first_step, GEMMA3),
    Case(model_defects.weights_around_zero_taken_for_gains, "tp2", parity.check_first_step, GEMMA3),
    Case(model_defects.norms_without_weights_not_centred, "tp2", parity.check_first_step, OLMO1),
    Case(model_defects.multipliers_left_out, "tp2", parity.check_first_step, GRANITE),
    Case(model_defects.embedding_multiplier_left_out, "tp2", parity.check_first_step, GRANITE),
    Case(model_defects.attention_multiplier_left_out, "tp2", parity.check_first_step, GRANITE),
    Case(model_defects.queries_alone_clipped, "tp2", parity.check_first_step, OLMO1),
    Case(model_defects.exact_gelu_approximated, "tp2", parity.check_first_step, PYTHIA),
    Case(model_defects.gates_before_ups_of_geglu, "tp2", parity.check_first_step, OLMO1),
    Case(model_defects.relu_smoothed, "tp2", parity.check_first_step, OPT),
    Case(row_bias_on_every_rank, "tp2", parity.check_first_step, OPT),
    Case(model_defects.relu_not_squared, "tp2", parity.check_first_step, SMOLLM3),
    Case(model_defects.head_bias_on_the_first_rank_only, "tp2", parity.check_first_step, GPT_J),
    Case(model_defects.column_biases_left_out, "tp2", parity.check_first_step, SMOLLM3),
    Case(norm_of_the_own_heads, "tp2", parity.check_first_step, OLMO2),
    Case(gradient_of_the_norm_of_the_own_heads, "tp2", parity.check_first_step, OLMO2),
    Case(owners_orthogonalise_their_own_piece, "dp2", parity.check_curve, MUON),
    Case(owners_orthogonalise_their_own_piece, "zero2dp2", parity.check_curve, MUON),
    Case(owners_orthogonalise_their_own_piece, "zero3dp2", parity.check_curve, MUON),
    Case(tensor_parallel_shares_orthogonalised, "tp2", parity.check_curve, MUON),
    Case(pieces_of_a_matrix_out_of_order, "zero3dp2", parity.check_curve, MUON),
    Case(matrices_of_one_parameter_as_one, "single", parity.check_curve, MUON),
    Case(matrices_of_one_parameter_as_one, "tp2", parity.check_curve, GATED_MUON),
    Case(momentum_without_nesterov, "single", parity.check_curve, MUON),
    Case(trust_ratio_of_a_part, "dp2", parity.check_curve, LAMB),
    Case(trust_ratio_of_a_part, "tp2", parity.check_curve, LAMB),
    Case(trust_ratio_of_a_part, "zero3dp2", parity.check_curve, LAMB),
    Case(slope_of_the_cap_left_out_in_chunks, "tp2", parity.check_first_step, CAPPED),
    Case(cap_after_the_bias, "pp2", parity.check_first_step, CAPPED),
    Case(loss_of_gathered_logits, "tp2", parity.check_first_step),
    Case(sinks_of_the_first_rank_in_the_norm, "tp2", parity.check_first_step, SINKS),
    Case(norm_of_the_own_stage, "pp2", parity.check_first_step),
    Case(replicated_parameters_count_on_every_rank, "pp2", parity.check_first_step),
    Case(mean_of_the_ranks_own_means, "cp2", parity.check_first_step, scenario_with(masked=True)),
    Case(mean_of_the_ranks_own_means, "dp2", parity.check_first_step, scenario_with(masked=True)),
    Case(blocks_numbered_from_the_stage, "pp2", parity.check_initial_weights),
    Case(a_step_counted_before_the_first, "dp2", parity.check_curve),
    Case(average_begins_at_zero, "dp2", parity.check_curve, EMA),
    Case(average_begins_at_zero, "zero3dp2", parity.check_curve, EMA),
    Case(average_with_its_share_for_its_decay, "tp2", parity.check_curve, EMA),
]


class Runs:
    """Healthy runs, each trained once for all the cases that need it."""

    def __init__(self) -> None:
        self._references: list[tuple[Scenario, Run]] = []
        self._layouts: list[tuple[Scenario, str, Run]] = []

    def reference(self, scenario: Scenario) -> Run:
        for known, run in self._references:
            if known == scenario:
                return run
        self._references.append((scenario, train_reference(scenario)))
        return self._references[-1][1]

    def layout(self, scenario: Scenario, name: str) -> Run:
        for known, layout, run in self._layouts:
            if (known, layout) == (scenario, name):
                return run
        self._layouts.append((scenario, name, train_layout(scenario, LAYOUTS[name])))
        return self._layouts[-1][2]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


OF_EVERY_AXIS = (
    "local_alibi_slopes-tp2",
    "clipping_skipped_on_higher_ranks-tp2",
    "averaged_replicas-dp2",
    "bf16_reduction-dp2",
    "divided_by_the_shards_twice-zero3dp2",
    "padding_in_the_softmax-tp2",
    "messages_received_in_another_order-pp2 interleaved",
    "key_and_value_gradients_not_summed_over_context-cp2",
    "gradients_of_one_copy_of_a_kv_head-ulysses3",
    "embedding_norm_decays-single",
)
"""The others are slow only because they are many."""


@pytest.mark.quick(*OF_EVERY_AXIS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.defect.__name__}-{case.layout}")
def test_every_planted_defect_is_caught(case: Case, runs: Runs) -> None:
    """Catches a parity check that cannot fail."""
    reference = runs.reference(case.scenario)
    assert case.check(runs.layout(case.scenario, case.layout), reference) == [], "the check fails without the defect"
    mutant = train_layout(case.scenario, LAYOUTS[case.layout], case.defect)
    assert case.check(mutant, reference) != [], f"{case.check.__name__} does not see {case.defect.__name__}"


def apply_all() -> None:
    """Applies every defect to this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("megads")]
    classes = {found for module in modules for found in vars(module).values() if isinstance(found, type)}
    names = {place: set(dir(place)) for place in [*modules, *classes]}
    for case in CASES:
        case.defect()
        made = [
            f"{place}: {sorted(set(dir(place)) - known)}" for place, known in names.items() if set(dir(place)) - known
        ]
        assert not made, f"{case.defect.__name__} makes what nobody calls: {made}"


@pytest.mark.slow
def test_every_defect_finds_its_place() -> None:
    """Catches a defect of code that is called otherwise by now, before its slow case is due."""
    command = [sys.executable, "-c", f"from {__name__} import apply_all; apply_all()"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
