"""Peers of `scripts.bench.small_machine` that train with Muon, written from published ideas in plain PyTorch.

`nanochat`: the recipe of nanochat (https://github.com/karpathy/nanochat, MIT) for a small CPU run: RMSNorm without
weights, also after the embedding; rotary positions, then normalized queries and keys; ReLU^2; an untied head whose
logits are softcapped; output projections that begin at zero; Muon for matrices and AdamW for embedding and head, with
rates tuned at a width of 768; constant rate, then a linear warmdown.

`modded`: the ideas of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt, MIT) in addition: value
embeddings in the first and last layers, skip connections from the first to the second half, the embedding mixed into
every layer, and a trapezoidal schedule. Not its kernels, FP8 or sliding windows, which need a GPU.

Neither is the project's code, nor run with all its settings: weight decay is 0, as it has no effect in a few hundred
steps.

Shape suffixes: b = batch, s = sequence, n = heads, d = head dim, h = hidden, v = vocabulary, k = matrices of one shape,
r = rows, c = columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REFERENCE_WIDTH = 768
SOFTCAP = 15.0
MOMENTUM, FIRST_MOMENTUM, MOMENTUM_STEPS = 0.95, 0.85, 300


@dataclass(frozen=True)
class Recipe:
    """Settings that differ between the peers.

    Attributes:
        embedding_lr, head_lr: rates of AdamW at a width of 768, scaled by the inverse square root of the width.
        matrix_lr: rate of Muon, whose updates are scaled by sqrt(max(1, rows / columns)).
        scalar_lr: rate of AdamW for mixing weights.
        warmdown: share of the steps in which the rate falls.
        last: rate at the end, relative to the peak.
        modded: value embeddings, skip connections and the embedding in every layer.
    """

    embedding_lr: float
    head_lr: float
    matrix_lr: float
    scalar_lr: float
    warmdown: float
    last: float
    modded: bool


RECIPES = {
    "nanochat": Recipe(0.3, 0.008, 0.02, 0.5, warmdown=0.65, last=0.05, modded=False),
    "modded": Recipe(0.3, 0.008, 0.04, 0.04, warmdown=0.45, last=0.0, modded=True),
}


def normalize(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without weights."""
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Causal attention with rotary positions and normalized queries and keys."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x_bsh: Tensor, angles_sd: tuple[Tensor, Tensor], extra_bsh: Tensor | None) -> Tensor:
        """extra_bsh: value embedding, added to the values; None for none."""
        split = (self.heads, x_bsh.shape[-1] // self.heads)
        q, k, v = (layer(x_bsh).unflatten(-1, split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if extra_bsh is not None:
            v = v + extra_bsh.unflatten(-1, split).transpose(1, 2)
        q, k = (normalize(rotate(x, angles_sd)) for x in (q, k))
        mixed_bnsd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.output(mixed_bnsd.transpose(1, 2).flatten(2))
        return found


def rotate(x_bnsd: Tensor, angles_sd: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first half of the features against the second."""
    cos, sin = (part[: x_bnsd.shape[2]].to(x_bnsd.dtype) for part in angles_sd)
    first, second = x_bnsd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each on the normalized residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x_bsh: Tensor, angles_sd: tuple[Tensor, Tensor], extra_bsh: Tensor | None) -> Tensor:
        x_bsh = x_bsh + self.attention(normalize(x_bsh), angles_sd, extra_bsh)
        found: Tensor = x_bsh + self.down(F.relu(self.up(normalize(x_bsh))).square())
        return found


class PeerModel(nn.Module):
    """The model of a peer; returns logits [b, s, v].

    Args:
        recipe: the peer.
        layers, hidden, heads, vocabulary, seq_len: sizes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe, layers: int, hidden: int, heads: int, vocabulary: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.values = nn.ModuleDict()
        self.mixing: nn.Parameter | None = None
        if recipe.modded:
            # The same embedding serves a layer and its mirror image from the end.
            self.values.update({str(layer): nn.Embedding(vocabulary, hidden) for layer in range(min(2, layers // 2))})
            # Of each layer: residual stream, embedding, skip connection, value embedding.
            self.mixing = nn.Parameter(torch.tensor([[1.0, 0.0, 1.0, 0.5]] * layers))
        frequency_d = 10000.0 ** -torch.linspace(0, 1, hidden // heads // 2 + 1)[:-1]
        angles_sd = torch.arange(seq_len)[:, None] * frequency_d
        self.register_buffer("cos", angles_sd.cos(), persistent=False)
        self.register_buffer("sin", angles_sd.sin(), persistent=False)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                module.weight.normal_(0.0, min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns))
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 1.0 if module is self.embedding else 0.02)
        self.head.weight.zero_()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.output.weight.zero_()
            block.down.weight.zero_()

    def forward(self, tokens_bs: Tensor) -> Tensor:
        first_bsh = x_bsh = normalize(self.embedding(tokens_bs))
        layers, kept = len(self.blocks), list[Tensor]()
        for layer, block in enumerate(self.blocks):
            extra_bsh = None
            if self.mixing is not None:
                stream, start, skip, value = self.mixing[layer]
                x_bsh = stream * x_bsh + start * first_bsh
                if layer >= layers - len(kept):
                    x_bsh = x_bsh + skip * kept[layers - 1 - layer]
                name = str(min(layer, layers - 1 - layer))
                if name in self.values:
                    extra_bsh = value * self.values[name](tokens_bs)
            x_bsh = block(x_bsh, (self.cos, self.sin), extra_bsh)
            if layer < layers // 2 and self.mixing is not None:
                kept.append(x_bsh)
        logits_bsv = self.head(normalize(x_bsh)).float()
        return SOFTCAP * torch.tanh(logits_bsv / SOFTCAP)


def orthogonalize(x_krc: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration with Jordan's coefficients, on matrices of one shape."""
    tall = x_krc.shape[1] > x_krc.shape[2]
    x_krc = x_krc.mT if tall else x_krc
    x_krc = x_krc / x_krc.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram_krr = x_krc @ x_krc.mT
        x_krc = 3.4445 * x_krc + (-4.7750 * gram_krr + 2.0315 * gram_krr @ gram_krr) @ x_krc
    return x_krc.mT if tall else x_krc


class PeerOptimizer:
    """Muon for the matrices of blocks, AdamW for all others, with the schedule of the recipe.

    Args:
        model: the model.
        recipe: the peer.
        steps: length of training.
        warmup: steps of linear warmup.
        scale: multiple of all rates, in addition to those of the width.
    """

    def __init__(self, model: PeerModel, recipe: Recipe, steps: int, warmup: int, scale: float) -> None:
        self._recipe, self._steps, self._warmup = recipe, steps, warmup
        width = (model.embedding.embedding_dim / REFERENCE_WIDTH) ** -0.5
        by_shape = dict[tuple[int, ...], list[Tensor]]()
        for weight in model.blocks.parameters():
            by_shape.setdefault(tuple(weight.shape), []).append(weight)
        self._matrices = list(by_shape.values())
        self._momentum = [torch.zeros(len(same), *same[0].shape) for same in self._matrices]
        self._matrix_lr = recipe.matrix_lr * scale
        embeddings = [model.embedding.weight, *model.values.parameters()]
        groups = [
            {"params": embeddings, "peak": recipe.embedding_lr * width * scale},
            {"params": [model.head.weight], "peak": recipe.head_lr * width * scale},
        ]
        if model.mixing is not None:
            groups.append({"params": [model.mixing], "peak": recipe.scalar_lr * scale})
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)

    def factor(self, step: int) -> float:
        """The rate of a step, from 0, relative to its peak: a trapezoid."""
        rising = min(1.0, (step + 1) / max(1, self._warmup))
        left = (self._steps - step) / max(1.0, self._recipe.warmdown * self._steps)
        return min(rising, self._recipe.last + (1.0 - self._recipe.last) * min(1.0, left))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the weights by their gradients, which are then dropped.

        Args:
            step: number of the step, from 0.
        """
        factor = self.factor(step)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * factor
        self._adamw.step()
        share = min(1.0, step / MOMENTUM_STEPS)
        momentum = FIRST_MOMENTUM + share * (MOMENTUM - FIRST_MOMENTUM)
        for same, momentum_krc in zip(self._matrices, self._momentum, strict=True):
            gradient_krc = torch.stack([weight.grad for weight in same if weight.grad is not None])
            momentum_krc.lerp_(gradient_krc, 1.0 - momentum)
            update_krc = orthogonalize(gradient_krc.lerp_(momentum_krc, momentum))
            rate = self._matrix_lr * factor * math.sqrt(max(1.0, same[0].shape[0] / same[0].shape[1]))
            for weight, update_rc in zip(same, update_krc, strict=True):
                weight.sub_(update_rc, alpha=rate)
        for weight in self._all():
            weight.grad = None

    def _all(self) -> Sequence[Tensor]:
        by_adamw = [weight for group in self._adamw.param_groups for weight in group["params"]]
        return [*by_adamw, *(weight for same in self._matrices for weight in same)]
