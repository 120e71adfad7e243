"""The model written down a second time, in fp64 with explicit loops, from the papers and not from megads' code.

Weights come by name, as `GPT.parameters_by_name` gives them. Shapes: s = sequence, h = hidden size, d = head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megads.model.config import ModelConfig, Position

Weights = Mapping[str, Tensor]


def slope(head: int, num_heads: int) -> float:
    """Slope of one head, by the recursion of the ALiBi paper's reference code."""

    def of_power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start**i for i in range(1, n + 1)]

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return of_power_of_two(n)
        lower = 2 ** math.floor(math.log2(n))
        return of_power_of_two(lower) + slopes(2 * lower)[0::2][: n - lower]

    return slopes(num_heads)[head]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(
    x_sh: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    dense_weight: Tensor,
    dense_bias: Tensor,
    num_heads: int,
    alibi: bool,
) -> Tensor:
    """One sequence; row (head * 3 + part) * d + i of the QKV weight is feature i of a head's q, k or v."""
    seq_len, hidden = x_sh.shape
    dim = hidden // num_heads
    context = torch.zeros_like(x_sh)
    for head in range(num_heads):
        q, k, v = (
            x_sh @ qkv_weight[rows : rows + dim].T + qkv_bias[rows : rows + dim]
            for rows in ((head * 3 + part) * dim for part in range(3))
        )
        for query in range(seq_len):
            scores = torch.stack([q[query] @ k[key] / math.sqrt(dim) for key in range(query + 1)])
            if alibi:
                scores = scores + slope(head, num_heads) * torch.arange(query + 1, dtype=x_sh.dtype)
            weights = scores.exp() / scores.exp().sum()
            context[query, head * dim : (head + 1) * dim] = sum(weights[key] * v[key] for key in range(query + 1))
    return context @ dense_weight.T + dense_bias


def logits(config: ModelConfig, weights: Weights, tokens_s: Tensor) -> Tensor:
    """[s, v] of one sequence."""
    w, eps = {name: tensor.double() for name, tensor in weights.items()}, config.norm_eps

    def norm(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    x = w["embedding.word.weight"][tokens_s]
    if config.position is Position.learned:
        x = x + w["embedding.position.weight"][: len(tokens_s)]
    if config.embedding_norm:
        x = norm("embedding.norm", x)
    for block in (f"blocks.{index}" for index in range(config.num_layers)):
        projections = (
            w[f"{block}.attention.{part}"] for part in ("qkv.weight", "qkv.bias", "dense.weight", "dense.bias")
        )
        alibi = config.position is Position.alibi
        x = x + attention(norm(f"{block}.input_norm", x), *projections, config.num_heads, alibi)
        up = norm(f"{block}.post_attention_norm", x) @ w[f"{block}.mlp.up.weight"].T + w[f"{block}.mlp.up.bias"]
        x = x + gelu_tanh(up) @ w[f"{block}.mlp.down.weight"].T + w[f"{block}.mlp.down.bias"]
    head = w["embedding.word.weight"] if config.tie_embeddings else w["head.weight"]
    return norm("final_norm", x) @ head.T
