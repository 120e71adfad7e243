"""FLOP counts against a count by torch and a published figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megads.batch import BatchInfo
from megads.model.config import MLPKind, ModelConfig
from megads.model.gpt import GPT, Block, ParallelBlock
from megads.parallel.config import Recompute
from megads.parallel.recompute import recompute_module
from megads.plan.flops import hardware_flops_per_token, hardware_tflops_bloom, model_flops_per_token


def test_model_flops_equal_counted_ones() -> None:
    """Catches a missing head, a wrong attention term or a factor of two: torch counts the real matrix products."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, ffn_size=40, vocab_size=50)
    seq_len, heads, head_dim = 12, config.num_heads, config.head_dim
    shapes = [(48, 16), (16, 16), (40, 16), (16, 40), (50, 16)]
    qkv, dense, up, down, head = (torch.randn(shape, requires_grad=True) for shape in shapes)
    hidden_sh = torch.randn(seq_len, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q_nsd, k_nsd, v_nsd = F.linear(hidden_sh, qkv).view(seq_len, 3, heads, head_dim).permute(1, 2, 0, 3)
        context_nsd = (q_nsd @ k_nsd.transpose(1, 2)).softmax(-1) @ v_nsd
        out_sh = F.linear(context_nsd.transpose(0, 1).reshape(seq_len, 16), dense)
        F.linear(F.linear(F.linear(out_sh, up), down), head).sum().backward()  # type: ignore[no-untyped-call]
    assert model_flops_per_token(config, seq_len) * seq_len == counter.get_total_flops()


FEATURES = {"num_heads": 4, "num_kv_heads": 2, "mlp": MLPKind.swiglu, "parallel_block": True}


@pytest.mark.parametrize("changes", [{}, FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("hidden", [0.0, 0.1])
@pytest.mark.parametrize("mode", list(Recompute)[:3])
def test_hardware_flops_equal_counted_ones(mode: Recompute, hidden: float, changes: dict) -> None:
    """Catches products counted that recomputation stops before, and products it does again that are not counted.

    Attention dropout chooses the explicit product: torch's counter does not know the CPU's fused kernel.
    """
    config = ModelConfig(
        **{"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 40, "vocab_size": 50} | changes,
        hidden_dropout=hidden,
        attention_dropout=0.1,
    )
    model, seq_len = GPT(config, seed=0), 12
    for block in model.stages:
        if isinstance(block, Block | ParallelBlock) and mode is not Recompute.none:
            recompute_module(block if mode is Recompute.full else block.attention.core)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(seq_len)[None], BatchInfo(torch.zeros(1, dtype=torch.int64))).sum().backward()
    assert hardware_flops_per_token(config, seq_len, [mode, mode]) * seq_len == counter.get_total_flops()


def test_a_window_is_what_a_token_sees() -> None:
    """Catches products with keys that no token sees in MFU, and a window above the sample that adds some."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=50)
    whole, seen = model_flops_per_token(config, 12), model_flops_per_token(replace(config, window=5), 12)
    assert whole - seen == 12 * 16 * (12 - 5)
    assert model_flops_per_token(replace(config, window=13), 12) == whole


def test_bloom_published_figure() -> None:
    """Catches a changed term of the published formula."""
    tflops = hardware_tflops_bloom(
        samples=2048,
        seq_len=2048,
        num_layers=70,
        hidden_size=14336,
        vocab_size=250_880,
        step_time_s=105.22,
        world_size=384,
    )
    assert tflops == pytest.approx(149.02, abs=0.01)
