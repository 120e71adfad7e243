"""A second implementation of the model, in fp64 with explicit loops, from the papers and not from megads' code.

Weights come by name, as `GPT.parameters_by_name` returns them. Shapes: s = sequence, h = hidden size, d = head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megads.model.config import MLPKind, ModelConfig, NormKind, NormPlacement, Position, QKNormWidth

Weights = Mapping[str, Tensor]


def slope(head: int, num_heads: int) -> float:
    """Returns the slope of one head, by the recursion of the ALiBi paper's reference code."""

    def of_power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start**i for i in range(1, n + 1)]

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return of_power_of_two(n)
        lower = 2 ** math.floor(math.log2(n))
        return of_power_of_two(lower) + slopes(2 * lower)[0::2][: n - lower]

    return slopes(num_heads)[head]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | float, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


ACTIVATIONS: dict[MLPKind, Callable[[Tensor], Tensor]] = {
    MLPKind.gelu: gelu_tanh,
    MLPKind.gelu_exact: gelu_erf,
    MLPKind.relu: lambda x: torch.where(x > 0, x, 0.0),
    MLPKind.relu2: lambda x: torch.where(x > 0, x * x, 0.0),
    MLPKind.swiglu: silu,
    MLPKind.geglu: gelu_tanh,
    MLPKind.geglu_exact: gelu_erf,
}
"""Of the gates, in a gated MLP."""


@dataclass(frozen=True)
class Layer:
    """Settings that may differ between layers."""

    window: int | None
    position: Position
    theta: float
    factor: float


def layer_of(config: ModelConfig, number: int) -> Layer:
    """Settings of a layer, from the pattern written out for every layer."""
    every = [kind for kind in config.layer_pattern for _ in range(kind.layers)]
    usual = Layer(config.window, config.position, config.rope_theta, config.rope_scaling.factor)
    if not every:
        return usual
    kind = (every * config.num_layers)[number]
    return Layer(
        {None: usual.window, 0: None}.get(kind.window, kind.window),
        kind.position or usual.position,
        kind.rope_theta or usual.theta,
        kind.rope_scaling.factor if kind.rope_scaling else usual.factor,
    )


def turned(x_d: Tensor, position: float, theta: float, rotated: int, interleaved: bool) -> Tensor:
    """RoPE of one vector: of its first r = `rotated` features, i and i + r/2, or 2i and 2i + 1, form a complex number
    that is rotated by position * theta^(-2i/r)."""
    out = x_d.clone()
    for i in range(rotated // 2):
        angle = position * theta ** (-2 * i / rotated)
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
        real, imaginary = x_d[first], x_d[second]
        out[first] = real * math.cos(angle) - imaginary * math.sin(angle)
        out[second] = real * math.sin(angle) + imaginary * math.cos(angle)
    return out


def attention(
    x_sh: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | float,
    dense_weight: Tensor,
    dense_bias: Tensor | float,
    config: ModelConfig,
    qk_norms: Sequence[Callable[[Tensor], Tensor]] | None = None,
    starts: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    sinks_n: Tensor | None = None,
    number: int = 0,
) -> Tensor:
    """Attention of one sequence in layer `number`.

    Rows of the QKV weight are blocks of d: for each key head its queries, then k, then v.

    `qk_norms` are those of queries and of keys; `starts` has the position at which each query's document starts,
    `positions` those that RoPE uses.
    """
    seq_len, hidden = x_sh.shape
    layer = layer_of(config, number)
    num_heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    dim, shared = config.head_size or hidden // num_heads, num_heads // kv_heads
    starts = [0] * seq_len if starts is None else starts
    positions = range(seq_len) if positions is None else positions
    context = x_sh.new_zeros(seq_len, num_heads * dim)

    def projected(block: int) -> Tensor:
        rows = slice(block * dim, (block + 1) * dim)
        found = x_sh @ qkv_weight[rows].T + (qkv_bias[rows] if isinstance(qkv_bias, Tensor) else qkv_bias)
        bound = config.qkv_clip or math.inf
        return torch.where(found > bound, bound, torch.where(found < -bound, -bound, found))

    def projected_together(blocks: Sequence[int]) -> Tensor:
        return torch.cat([projected(block) for block in blocks], dim=-1)

    query_blocks = [group * (shared + 2) + within for group in range(kv_heads) for within in range(shared)]
    key_blocks = [group * (shared + 2) + shared for group in range(kv_heads)]
    for head in range(num_heads):
        group, within = divmod(head, shared)
        first = group * (shared + 2)
        q, k, v = projected(first + within), projected(first + shared), projected(first + shared + 1)
        if qk_norms is not None and config.qk_norm_width is QKNormWidth.head:
            q, k = qk_norms[0](q), qk_norms[1](k)
        elif qk_norms is not None:
            q = qk_norms[0](projected_together(query_blocks))[:, head * dim : (head + 1) * dim]
            k = qk_norms[1](projected_together(key_blocks))[:, group * dim : (group + 1) * dim]
        if layer.position is Position.rope:
            how = (layer.theta, int(dim * config.rotary_fraction), config.rotary_interleaved)
            q = torch.stack([turned(row, at / layer.factor, *how) for row, at in zip(q, positions, strict=True)])
            k = torch.stack([turned(row, at / layer.factor, *how) for row, at in zip(k, positions, strict=True)])
        for query in range(seq_len):
            window = layer.window or seq_len
            seen = [key for key in range(starts[query], query + 1) if query - key < window]
            scale = config.attention_multiplier or 1 / math.sqrt(dim)
            scores = torch.stack([q[query] @ k[key] * scale for key in seen])
            if config.attention_logit_softcap is not None:
                scores = config.attention_logit_softcap * torch.tanh(scores / config.attention_logit_softcap)
            if layer.position is Position.alibi:
                scores = scores + slope(head, num_heads) * (torch.tensor(seen, dtype=x_sh.dtype) - query)
            nowhere = 0.0 if sinks_n is None else sinks_n[head].exp()
            weights = dict(zip(seen, scores.exp() / (scores.exp().sum() + nowhere), strict=True))
            context[query, head * dim : (head + 1) * dim] = sum(weights[key] * v[key] for key in seen)
    return context @ dense_weight.T + dense_bias


def mlp(x: Tensor, weights: Weights, name: str, config: ModelConfig) -> Tensor:
    """MLP, of whose `gate_up` the even rows are the gate projection and the odd rows the up projection."""
    act = ACTIVATIONS[config.mlp]
    if f"{name}.up.weight" in weights:
        inner = act(x @ weights[f"{name}.up.weight"].T + weights.get(f"{name}.up.bias", 0.0))
    else:
        both = x @ weights[f"{name}.gate_up.weight"].T + weights.get(f"{name}.gate_up.bias", 0.0)
        gate, up = both[:, 0::2], both[:, 1::2]
        inner = act(gate) * up
    return inner @ weights[f"{name}.down.weight"].T + weights.get(f"{name}.down.bias", 0.0)


def logits(
    config: ModelConfig,
    weights: Weights,
    tokens_s: Tensor,
    starts: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> Tensor:
    """Returns [s, v] logits of one sequence; `starts` as in `attention`, `positions` by default count within it.

    Of the kinds of RoPE scaling it knows linear only.
    """
    w, eps = {name: tensor.double() for name, tensor in weights.items()}, config.norm_eps

    def norm(name: str, x: Tensor) -> Tensor:
        gain = w.get(f"{name}.weight", torch.ones(x.shape[-1], dtype=x.dtype))
        gain = 1.0 + gain if config.norm_zero_centered else gain
        if config.norm is NormKind.rmsnorm:
            return rms_norm(x, gain, eps)
        return layer_norm(x, gain, w.get(f"{name}.bias", 0.0), eps)

    x = w["embedding.word.weight"][tokens_s]
    if config.scale_embedding:
        x = x * math.sqrt(config.hidden_size)
    x = x * config.embedding_multiplier
    if config.position is Position.learned:
        x = x + w["embedding.position.weight"][list(positions or range(len(tokens_s)))]
    if config.embedding_norm:
        x = norm("embedding.norm", x)
    factor = config.residual_multiplier
    for number in range(config.num_layers):
        block = f"blocks.{number}"
        projections = (
            w.get(f"{block}.attention.{part}", 0.0) for part in ("qkv.weight", "qkv.bias", "dense.weight", "dense.bias")
        )
        before = config.norm_placement in (NormPlacement.input, NormPlacement.both)
        normed = norm(f"{block}.input_norm", x) if before else x
        qk_norms = [partial(norm, f"{block}.attention.{part}_norm") for part in ("query", "key")]
        sinks_n = w.get(f"{block}.attention.sinks.weight")
        attended = attention(
            normed, *projections, config, qk_norms if config.qk_norm else None, starts, positions, sinks_n, number
        )
        if config.norm_placement is not NormPlacement.input:
            x = x + factor * norm(f"{block}.attention_output_norm", attended)
            normed = norm(f"{block}.post_attention_norm", x) if before else x
            x = x + factor * norm(f"{block}.mlp_output_norm", mlp(normed, w, f"{block}.mlp", config))
        elif config.parallel_block:
            second = norm(f"{block}.post_attention_norm", x) if config.parallel_norms == 2 else normed
            x = x + factor * attended + factor * mlp(second, w, f"{block}.mlp", config)
        else:
            x = x + factor * attended
            x = x + factor * mlp(norm(f"{block}.post_attention_norm", x), w, f"{block}.mlp", config)
    head = w["embedding.word.weight"] if config.tie_embeddings else w["head.weight"]
    out = config.logit_scale * (norm("final_norm", x) @ head.T) + w.get("head.bias", 0.0)
    cap = config.final_logit_softcap
    return out if cap is None else cap * torch.tanh(out / cap)
