"""Mixtures of experts against a second implementation: loops over tokens in fp64, from the papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig
from megads.model.moe import SUMMARY, MoE, Router
from megads.model.moe_config import MoEConfig, Overflow, RouterScore

B, S, H, E, F = 2, 6, 8, 6, 5
BASE = MoEConfig(num_experts=E, top_k=2, expert_ffn_size=F)
CASES = {
    "mixtral": replace(BASE, global_loss=0.3),
    "olmoe": replace(BASE, top_k=3, normalize_weights=False, sequence_loss=0.2, z_loss=0.1),
    "deepseek": replace(
        BASE,
        score=RouterScore.sigmoid,
        num_groups=3,
        top_groups=2,
        routed_scale=2.5,
        bias_rate=0.1,
        sequence_loss=0.2,
        shared_ffn_size=4,
    ),
    "qwen2": replace(BASE, shared_ffn_size=7, shared_gate=True, router_bias=True, z_loss=0.1),
    "dropping": replace(BASE, top_k=3, global_loss=0.3, capacity_factor=0.7, overflow=Overflow.drop),
}


def layer_of(moe: MoEConfig, kind: MLPKind = MLPKind.swiglu) -> MoE:
    layer = MoE(ModelConfig(hidden_size=H, mlp=kind, bias=False, moe=moe)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
    return layer


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = gate_up[0::2] @ x, gate_up[1::2] @ x
    return down @ (gate / (1 + (-gate).exp()) * up)


def naive(layer: MoE, hidden: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, balance and z-losses, and counts of every expert, by loops over tokens."""
    moe, router, experts = layer.router.moe, layer.router, layer.experts
    gate_ups = experts.first.weight.view(E, 2 * F, H)
    downs = experts.down.weight.view(E, F, H)
    out, loss, counts = torch.zeros_like(hidden), hidden.new_zeros(()), torch.zeros(E, dtype=torch.float64)
    room = math.inf if moe.capacity_factor is None else math.ceil(moe.capacity_factor * S * moe.top_k / E)
    for b in range(B):
        shares, of_sample = [], torch.zeros(E, dtype=torch.float64)
        for s in range(S):
            x = hidden[b, s]
            logits = router.weight @ x + (0 if router.bias is None else router.bias)
            softmax = moe.score is RouterScore.softmax
            scores = logits.exp() / logits.exp().sum() if softmax else 1 / (1 + (-logits).exp())
            ranked = scores + (0 if router.expert_bias is None else router.expert_bias)
            allowed = set(range(E))
            if moe.num_groups > 1:
                size = E // moe.num_groups
                groups = [sorted(ranked[g * size : (g + 1) * size].tolist())[-2:] for g in range(moe.num_groups)]
                best = sorted(range(moe.num_groups), key=lambda g, groups=groups: -sum(groups[g]))[: moe.top_groups]
                allowed = {g * size + i for g in best for i in range(size)}
            chosen = sorted(allowed, key=lambda e, ranked=ranked: -ranked[e].item())[: moe.top_k]
            total = sum(scores[e] for e in chosen) if moe.normalize_weights else 1.0
            for e in chosen:
                weight = moe.routed_scale * scores[e] / total
                if of_sample[e] < room:
                    out[b, s] = out[b, s] + weight * swiglu(x, gate_ups[e], downs[e].T)
                of_sample[e] += 1
            if layer.shared is not None:
                shared = swiglu(x, layer.shared.first.weight, layer.shared.down.weight)
                gate = 1.0 if layer.shared_gate is None else 1 / (1 + (-(layer.shared_gate.weight @ x)).exp())
                out[b, s] = out[b, s] + gate * shared
            shares.append(scores / scores.sum())
            loss = loss + moe.z_loss * logits.exp().sum().log() ** 2 / tokens
            if router.expert_load is not None:
                loss = loss + moe.global_loss * (router.expert_load * shares[-1]).sum() / tokens
        fraction, mean = of_sample * E / (moe.top_k * S), sum(shares) / S
        loss = loss + moe.sequence_loss * (fraction * mean).sum() * S / tokens
        counts += of_sample
    return out, loss, counts


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_that_of_plain_loops(name: str) -> None:
    """Catches experts, groups, weights or balance losses other than those of the papers, and their gradients."""
    layer = layer_of(CASES[name])
    layer.router.statistics = torch.zeros(E + SUMMARY, dtype=torch.float64)
    hidden = torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    grad = torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    trained = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
    tokens = 3 * B * S
    out = layer(hidden, BatchInfo(torch.arange(B), step_tokens=tokens))
    found = torch.autograd.grad(out, trained, grad)
    expected_out, loss, counts = naive(layer, hidden, tokens)
    expected = torch.autograd.grad((expected_out * grad).sum() + loss, trained)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    statistics = layer.router.statistics
    assert torch.equal(statistics[:E], counts)
    torch.testing.assert_close(statistics[E : E + 2].sum() / tokens, loss)


def _passes(layer: MoE) -> tuple[Tensor, ...]:
    """Output and all gradients of a layer for fixed hidden states."""
    hidden = torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    out = layer(hidden, BatchInfo(torch.arange(B), step_tokens=B * S))
    return (out, *torch.autograd.grad(out.sin().sum(), [hidden, *(p for p in layer.parameters() if p.requires_grad)]))


@pytest.mark.parametrize(("factor", "padded"), [(4.0, True), (1.0, True), (1.0, False)])
def test_an_overflow_is_noted(factor: float, padded: bool) -> None:
    """Catches an overflow that goes unnoticed, a capacity needed that is not that of the fullest expert, and padding
    that changes output or gradients of rows that fit."""
    layer = layer_of(replace(BASE, global_loss=0.3, capacity_factor=factor))
    plain = _passes(layer)
    layer.router.statistics = torch.zeros(E + SUMMARY, dtype=torch.float64)
    overflow = layer.experts.overflow = torch.zeros(1 + E, dtype=torch.float64)
    layer.experts.padded = padded
    found = _passes(layer)
    mean, counts = B * S * 2 / E, layer.router.statistics[:E]
    beyond = (counts - math.ceil(factor * mean)).clamp(min=0.0).sum() if padded else 0.0
    assert overflow[0] == beyond and (overflow[0] > 0) == (factor == 1.0 and padded)
    torch.testing.assert_close(overflow[1:], counts / mean)
    if not beyond:
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one, other)


def test_validation_drops_nothing() -> None:
    """Catches a capacity in validation, where other tokens of a batch would change a token's loss."""
    layer = layer_of(CASES["dropping"]).eval()
    plain = layer_of(replace(BASE, top_k=3, global_loss=0.3))
    hidden = torch.randn(B, S, H, dtype=torch.float64)
    info = BatchInfo(torch.arange(B))
    assert torch.equal(layer(hidden, info), plain(hidden, info))
    assert not torch.equal(layer.train()(hidden, info), plain(hidden, info))


@pytest.mark.parametrize(("factor", "tokens", "rows"), [(1.0, 100, 20), (1.1, 500, 110), (1.25, 7, 2), (0.1, 5, 1)])
def test_the_capacity_is_rounded_up(factor: float, tokens: int, rows: int) -> None:
    """Catches one row more than the factor says, from rounding in floating point, and a capacity of none."""
    moe = MoEConfig(num_experts=10, top_k=2, capacity_factor=factor)
    assert moe.capacity(tokens) == rows


def test_experts_without_gates_are_mlps() -> None:
    """Catches a first projection of another width if the MLP has no gates."""
    layer = layer_of(replace(BASE, top_k=E), MLPKind.relu)
    hidden = torch.randn(1, 1, H, dtype=torch.float64)
    weights, chosen = layer.router(hidden, BatchInfo(torch.arange(1)))
    ups, downs = layer.experts.first.weight.view(E, F, H), layer.experts.down.weight.view(E, F, H)
    each = [downs[e].T @ (ups[e] @ hidden[0, 0]).relu() for e in chosen[0, 0].tolist()]
    expected = sum(weight * out for weight, out in zip(weights[0, 0], each, strict=True))
    torch.testing.assert_close(layer(hidden, BatchInfo(torch.arange(1)))[0, 0], expected)


def test_outside_of_training_nothing_is_counted() -> None:
    """Catches statistics of a validation, or of a forward pass whose backward pass never comes."""
    layer = layer_of(CASES["mixtral"])
    layer.router.statistics = torch.zeros(E + SUMMARY, dtype=torch.float64)
    hidden = torch.randn(B, S, H, dtype=torch.float64)
    for info in (BatchInfo(torch.arange(B)), BatchInfo(torch.arange(B), step_tokens=9)):
        layer(hidden, info)
    assert not layer.router.statistics.any()


def test_two_runs_have_the_same_bits() -> None:
    """Catches sums over a token's experts by atomic additions, whose order varies."""
    layer = layer_of(replace(BASE, top_k=4)).float()
    hidden = torch.randn(4, 64, H, generator=torch.Generator().manual_seed(7)).requires_grad_()
    runs = []
    for _ in range(2):
        out = layer(hidden, BatchInfo(torch.arange(4)))
        runs.append((out, *torch.autograd.grad(out.square().sum(), [hidden, layer.router.weight])))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_tokens_with_equal_scores_go_to_the_lowest_experts() -> None:
    """Catches a choice among equal scores that depends on the implementation."""
    router = Router(ModelConfig(hidden_size=H, bias=False, moe=BASE))
    torch.nn.init.zeros_(router.weight)
    assert router(torch.randn(1, 3, H), BatchInfo(torch.arange(1)))[1].tolist() == [[[0, 1]] * 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 7}, "model.moe.top_k = 7 is above model.moe.num_experts = 6"),
        ({"num_groups": 4}, "model.moe.num_groups = 4 does not divide"),
        ({"num_groups": 6}, "leaves 1 expert a group"),
        ({"num_groups": 3, "top_k": 3}, "model.moe.top_groups = 1 of num_groups = 3"),
        ({"shared_gate": True}, "needs a shared expert"),
        ({"first_dense": 2}, "leave no layer of model.num_layers = 2"),
        ({"interval": 3}, "leave no layer of model.num_layers = 2"),
        ({"z_loss": -1.0}, "model.moe.z_loss = -1.0"),
        ({"routed_scale": 0.0}, "model.moe.routed_scale = 0.0"),
        ({"capacity_factor": 0.0}, "model.moe.capacity_factor = 0.0: must be positive"),
        ({"capacity_factor": 0.9}, "model.moe.capacity_factor = 0.9 is below 1"),
        ({"overflow": Overflow.drop}, "model.moe.overflow = drop only applies with model.moe.capacity_factor"),
        ({"num_experts": 0, "top_k": 3}, "model.moe only applies with model.moe.num_experts above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    """Catches a mixture that cannot be computed, and a setting without effect."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig(bias=False, moe=replace(BASE, **changes)).check()
