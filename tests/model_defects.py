"""Defects in the options of the model, which tests/test_mutants.py applies to the running code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megads.model.attention
import megads.model.gpt
import megads.model.mlp
import megads.model.rotary
import megads.parallel.sharding
from megads.batch import BatchInfo
from megads.model.attention import Attention, Rotary
from megads.model.config import LayerKind, ModelConfig
from megads.model.gpt import Embedding, OutputNormBlock, ParallelBlock
from megads.model.layers import Norm
from megads.parallel.sharding import VocabParallelHead


def layers_counted_from_the_stage() -> None:
    inner = megads.model.gpt.make_block

    def make_block(config: ModelConfig, seed: int, index: int) -> Any:
        first = 0 if dist.get_rank() == 0 else 2  # of pp2, whose last stage has block 2 alone
        return inner(config.layer(index - first), seed, index)

    megads.model.gpt.make_block = make_block


def windows_of_layers_ignored() -> None:
    inner = LayerKind.applied_to
    LayerKind.applied_to = lambda self, model: replace(inner(self, model), window=model.window)


def bases_of_layers_ignored() -> None:
    inner = LayerKind.applied_to
    LayerKind.applied_to = lambda self, model: replace(inner(self, model), rope_theta=model.rope_theta)


def layers_without_positions_rotated() -> None:
    inner = LayerKind.applied_to
    LayerKind.applied_to = lambda self, model: replace(inner(self, model), position=model.position)


def frequencies_of_the_whole_head() -> None:
    """The frequencies of a fraction of the head fall as if all features were rotated."""
    inner = megads.model.rotary.scaled_frequencies
    megads.model.rotary.scaled_frequencies = lambda pairs, *how: inner(pairs.sqrt(), *how)


def rope_scaled_by_the_tokens_of_the_rank() -> None:
    inner = Rotary.tables
    Rotary.tables = lambda self, *sizes: inner(self, *sizes[:-1], replace(sizes[-1], seq_len=None))


def adjacent_features_taken_for_halves() -> None:
    inner = Rotary.__init__
    Rotary.__init__ = lambda self, *how: inner(self, *how[:3])


def mlp_reads_the_first_norm() -> None:
    def inputs(self: ParallelBlock, hidden: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor]:
        normed, unused = self.input_norm(hidden), 0 * self.post_attention_norm(hidden)
        qkv, up = self.attention.qkv(normed), self.mlp.first(normed + unused)
        return self.attention.context(*self.attention.heads(qkv, info), info), self.mlp.activate(up)

    ParallelBlock._inner = inputs


def inputs_not_normed() -> None:
    def forward(self: OutputNormBlock, hidden: Tensor, info: BatchInfo) -> Tensor:
        attended = self.attention_output_norm(self.attention(hidden + 0 * self.input_norm(hidden), info))
        hidden = hidden + attended
        return hidden + self.mlp_output_norm(self.mlp(self.post_attention_norm(hidden)))

    OutputNormBlock.forward = forward


def weights_around_zero_taken_for_gains() -> None:
    Norm.gain = property(lambda self: self.weight)


def norms_without_weights_not_centred() -> None:
    inner = Norm.__init__

    def init(self: Norm, *args: Any) -> None:
        inner(self, *args)
        self.subtracts_mean = self.weight is not None

    Norm.__init__ = init


def multipliers_left_out() -> None:
    megads.model.gpt._times = lambda x, _factor: x


def embedding_multiplier_left_out() -> None:
    inner = Embedding.__init__

    def init(self: Embedding, *args: Any) -> None:
        inner(self, *args)
        self.scale = 1.0

    Embedding.__init__ = init


def attention_multiplier_left_out() -> None:
    ModelConfig.query_scale = property(lambda self: 1.0)


def queries_alone_clipped() -> None:
    inner = Attention.heads

    def heads(self: Attention, qkv: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor, Tensor]:
        clip, self.qkv_clip = self.qkv_clip, None
        q, k, v = inner(self, qkv, info)
        self.qkv_clip = clip
        return q if clip is None else q.clamp(-clip, clip), k, v

    Attention.heads = heads


def exact_gelu_approximated() -> None:
    gelu = megads.model.mlp.F.gelu
    megads.model.mlp.F.gelu = lambda x, approximate="tanh": gelu(x, approximate="tanh")


def gates_before_ups_of_geglu() -> None:
    def geglu(gate_up: Tensor, *, exact: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up

    megads.model.mlp.geglu = geglu


def relu_not_squared() -> None:
    megads.model.mlp.squared_relu = torch.relu


def relu_smoothed() -> None:
    megads.model.mlp.F.relu = megads.model.mlp.F.gelu


def head_bias_on_the_first_rank_only() -> None:
    inner = VocabParallelHead.forward

    def forward(self: VocabParallelHead, hidden: Tensor, info: BatchInfo, targets: Any = None) -> Tensor:
        found = inner(self, hidden, info, targets)
        return found if self.region.axis.is_first or targets is not None else found - self.bias

    VocabParallelHead.forward = forward


def column_biases_left_out() -> None:
    inner = megads.parallel.sharding.column_parallel_linear

    def without(x: Tensor, weight: Any, bias: Any, *how: Any) -> Tensor:
        return inner(x, weight, None if bias is None else 0 * bias, *how)

    megads.parallel.sharding.column_parallel_linear = without
