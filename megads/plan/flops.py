"""Floating-point operations of training.

Convention of megads: MODEL operations, those the algorithm needs. Two per multiply-add, forward once and backward
twice, causal attention counted in full, no recomputation; norms, biases, activations and the embedding lookup are left
out. HARDWARE operations are these and the ones that recomputation does again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megads.model.config import ModelConfig, has_attention_core
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import Recompute
from megads.plan.parameters import custom_shapes


@dataclass(frozen=True)
class LayerFlops:
    """Operations a token of one layer.

    Attributes:
        forward: of a forward pass.
        backward_input: of a backward pass but for the gradients of weights; attention's products count twice here.
        backward_weight: of the gradients of its matrices.
    """

    forward: int
    backward_input: int
    backward_weight: int

    @property
    def total(self) -> int:
        return self.forward + self.backward_input + self.backward_weight


def block_flops(config: ModelConfig, seq_len: int) -> LayerFlops:
    """Of one block: its matrices and attention's two products, as PaLM counts them.

    Of a plugin's block: two per element of each matrix, and attention's products where it names an attention core.
    """
    if config.block.is_custom:
        matrices = 2 * sum(prod(shape) for shape in custom_shapes(config).values() if len(shape) == 2)
        attention = 2 * _product(config, seq_len) if has_attention_core(config) else 0
    else:
        matrices, attention = sum(_matrices(config)), 2 * _product(config, seq_len)
    return LayerFlops(matrices + attention, matrices + 2 * attention, matrices)


def _matrices(config: ModelConfig) -> tuple[int, int, int]:
    """Operations a token of a block's projections: attention's, those into the MLP, and the one out of it."""
    twice = 2 * config.hidden_size
    return twice * (config.qkv_width + config.hidden_size), twice * config.mlp_rows, twice * config.ffn_width


def _product(config: ModelConfig, seq_len: int) -> int:
    """Operations a token of one of attention's two products; a window is as many keys as a token sees at most."""
    return 2 * config.hidden_size * min(seq_len, config.window or seq_len)


def head_flops(config: ModelConfig) -> LayerFlops:
    """Of the output projection."""
    matrix = 2 * config.vocabulary * config.hidden_size
    return LayerFlops(matrix, matrix, matrix)


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward operations a token: 6 per matmul weight, the output head included, plus 12*L*h*S.

    The second term is attention's two products (scores and values), as in PaLM (Chowdhery et al. 2022, appendix B). A
    window takes the place of S where it is smaller.

    Args:
        config: the model; L = num_layers, h = hidden_size.
        seq_len: tokens a sample, S.
    """
    return config.num_layers * block_flops(config, seq_len).total + head_flops(config).total


def hardware_flops_per_token(config: ModelConfig, seq_len: int, blocks: Iterable[Recompute]) -> int:
    """Operations a token with what is recomputed.

    Recomputation stops at the last tensor that backward needs. Of a block that is the input of its last matrix, whose
    product is therefore made again only where a dropout follows; of attention by fused_softmax without
    dropout it is the probabilities, which are not multiplied by the values again; all others need their output.

    Args:
        config: the model.
        seq_len: tokens a sample.
        blocks: what each block of the model recomputes.
    """
    again = recompute_flops(config, seq_len)
    return model_flops_per_token(config, seq_len) + sum(again[block] for block in blocks)


def recompute_flops(config: ModelConfig, seq_len: int) -> dict[Recompute, int]:
    """Operations a token that a block's backward pass does again, by what is recomputed of it."""
    attention, into, out_of = _matrices(config)
    product = _product(config, seq_len)
    explicit = config.attention is AttentionKind.fused_softmax and not config.attention_dropout
    core = product if explicit else 2 * product
    full = attention + 2 * product + into + (out_of if config.hidden_dropout else 0)
    return {Recompute.none: 0, Recompute.selective: core, Recompute.full: full}


def hardware_tflops_bloom(
    *,
    samples: int,
    seq_len: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    step_time_s: float,
    world_size: int,
) -> float:
    """TFLOPs per GPU as BLOOM's logs report them; for comparison with published figures only.

    24*4*B*S*L*h^2 * (1 + S/(6h) + V/(16Lh)) / (t * world), Narayanan et al. 2021. The factor 4 counts a full
    recomputation of the forward pass, so this is a hardware, not a model, figure.

    Args:
        samples: samples a step, B.
        seq_len: tokens a sample, S.
        num_layers: L.
        hidden_size: h; the MLP is taken to be 4h wide.
        vocab_size: V, padding included.
        step_time_s: t.
        world_size: GPUs.
    """
    blocks = 24 * 4 * samples * seq_len * num_layers * hidden_size**2
    attention_and_head = 1 + seq_len / (6 * hidden_size) + vocab_size / (16 * num_layers * hidden_size)
    return blocks * attention_and_head / (step_time_s * world_size) / 1e12
