"""Parameter counts against published models, FLOP counts against torch's FlopCounterMode."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megads.batch import BatchInfo
from megads.engine.stage_pipeline import recompute_module
from megads.model.config import BlockConfig, LayerKind, MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import GPT, Block, ParallelBlock
from megads.model.model_size import (
    active_parameter_count,
    block_flops,
    hardware_flops_per_token,
    model_flops_per_token,
    parameter_count,
    parameter_shapes,
    recompute_flops,
)
from megads.model.moe_config import MoEConfig
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import Recompute
from megads.parallel.sharding import ShardingTable
from megads.runtime.registry import BLOCKS, NoOptions

VOCAB = 250_880


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "count"),
    [
        (14336, 70, 112, 176_247_271_424),
        (1024, 24, 16, 559_214_592),
        (1536, 24, 16, 1_065_314_304),
        (2048, 24, 16, 1_722_408_960),
        (2560, 30, 32, 3_002_557_440),
        (4096, 30, 32, 7_069_016_064),
    ],
)
def test_bloom_family(hidden: int, layers: int, heads: int, count: int) -> None:
    """Catches a missing bias, norm or embedding norm, and a tied head counted twice."""
    config = ModelConfig(hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=VOCAB)
    assert parameter_count(config) == count


def test_optional_parameters() -> None:
    """Catches an option of the model that adds or drops the wrong tensors."""
    plain = ModelConfig(hidden_size=8, num_heads=2, vocab_size=32, max_seq_len=16, ffn_size=24)
    full = ModelConfig(**{**plain.__dict__, "position": Position.learned, "tie_embeddings": False})
    bare = ModelConfig(**{**plain.__dict__, "embedding_norm": False})
    assert parameter_count(full) - parameter_count(plain) == 16 * 8 + 32 * 8
    assert parameter_count(plain) - parameter_count(bare) == 16
    assert parameter_shapes(plain)["blocks.1.mlp.up.weight"] == (24, 8)
    assert parameter_shapes(plain)["blocks.1.mlp.down.weight"] == (8, 24)
    assert sum(prod(shape) for shape in parameter_shapes(full).values()) == parameter_count(full)


def test_qwen3() -> None:
    """Catches a head size of hidden_size / num_heads, and QK norms that are missing or counted per head: Qwen3-0.6B has
    596,049,920 parameters."""
    qwen = ModelConfig(
        hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_size=128, ffn_size=3072, vocab_size=151936,
        position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, embedding_norm=False, bias=False,
        qk_norm=True,
    )  # fmt: skip
    assert parameter_count(qwen) == 596_049_920
    assert parameter_count(replace(qwen, qk_norm=False)) == 596_049_920 - 28 * 2 * 128


def test_tiny_llama() -> None:
    """Catches keys counted for every query head, a missing gate, and a bias in a norm or projection that has none:
    TinyLlama-1.1B has 1,100,048,384 parameters (Zhang et al. 2024)."""
    biased = ModelConfig(
        hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn_size=5632, vocab_size=32000,
        position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, embedding_norm=False, tie_embeddings=False,
    )  # fmt: skip
    biases = sum(prod(shape) for name, shape in parameter_shapes(biased).items() if name.endswith(".bias"))
    assert biases == 22 * (2560 + 2048 + 2 * 5632 + 2048)
    assert parameter_count(biased) - biases == parameter_count(replace(biased, bias=False)) == 1_100_048_384
    layer_norms = replace(biased, bias=False, norm=NormKind.layernorm)
    assert not any(name.endswith(".bias") for name in parameter_shapes(layer_norms))


def test_model_flops_equal_counted_ones() -> None:
    """Catches a missing head, a wrong attention term or a factor of two: torch counts the FLOPs of the real GEMMs."""
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


FEATURES = {"num_heads": 4, "head_size": 6, "num_kv_heads": 2, "mlp": MLPKind.swiglu, "parallel_block": True}


EXPERTS = {"bias": False, "mlp": MLPKind.swiglu, "moe": MoEConfig(4, expert_ffn_size=12)}
SHARED = EXPERTS | {"moe": MoEConfig(4, expert_ffn_size=12, shared_ffn_size=20, shared_gate=True)}


@pytest.mark.parametrize(
    "changes", [{}, FEATURES, EXPERTS, SHARED], ids=["plain", "features", "experts", "shared expert"]
)
@pytest.mark.parametrize("hidden", [0.0, 0.1])
@pytest.mark.parametrize("mode", list(Recompute)[:3])
def test_hardware_flops_equal_counted_ones(mode: Recompute, hidden: float, changes: dict) -> None:
    """Catches GEMMs that are counted but not recomputed, and recomputed GEMMs that are not counted.

    Attention dropout selects attention with explicit scores: torch's counter does not know the CPU's fused kernel.
    """
    config = ModelConfig(
        **{"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 40, "vocab_size": 50} | changes,
        hidden_dropout=hidden,
        attention_dropout=0.1,
    )
    model, seq_len = GPT(config, seed=0), 12
    for block in model.layers:
        if isinstance(block, Block | ParallelBlock) and mode is not Recompute.none:
            recompute_module(block if mode is Recompute.full else block.attention.core)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(seq_len)[None], BatchInfo(torch.zeros(1, dtype=torch.int64))).sum().backward()
    assert hardware_flops_per_token(config, seq_len, [mode, mode]) * seq_len == counter.get_total_flops()


def test_a_window_is_what_a_token_sees() -> None:
    """Catches MFU that counts keys outside the window, and a window longer than the sample that adds FLOPs."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=50)
    whole, seen = model_flops_per_token(config, 12), model_flops_per_token(replace(config, window=5), 12)
    assert whole - seen == 12 * 16 * (12 - 5)
    assert model_flops_per_token(replace(config, window=13), 12) == whole


def test_flops_of_layers_that_differ() -> None:
    """Catches FLOPs of the first kind of layers for all of them, and recomputation counted for another layer's kind."""
    config = ModelConfig(num_layers=3, hidden_size=16, num_heads=2, vocab_size=50)
    kinds = [LayerKind(layers=2, window=5), LayerKind(window=0)]
    mixed, full, narrow = replace(config, layer_pattern=kinds), config, replace(config, window=5)
    assert 3 * model_flops_per_token(mixed, 12) == 2 * model_flops_per_token(narrow, 12) + model_flops_per_token(
        full, 12
    )
    modes = [Recompute.none, Recompute.none, Recompute.selective]
    again = hardware_flops_per_token(mixed, 12, modes) - model_flops_per_token(mixed, 12)
    assert again == recompute_flops(full, 12)[Recompute.selective] != recompute_flops(narrow, 12)[Recompute.selective]
    assert parameter_count(mixed) == parameter_count(config)


def test_recomputed_attention_stops_at_what_backward_needs() -> None:
    """Catches a recomputed GEMM of probabilities and values for fused_softmax, and a missing one with dropout. One GEMM
    is 2 * 16 * 12 FLOPs per token."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=50)
    for attention, dropout, products in (
        (AttentionKind.fused_softmax, 0.0, 1),
        (AttentionKind.fused_softmax, 0.1, 2),
        (AttentionKind.sdpa, 0.0, 2),
    ):
        again = recompute_flops(replace(config, attention=attention, attention_dropout=dropout), 12)
        assert again[Recompute.selective] == products * 2 * 16 * 12


@pytest.mark.parametrize("cores", [(), ("core",)])
def test_a_block_of_a_plugin(cores: tuple[str, ...]) -> None:
    """Catches a plugin's matrices without a multiply and an add per element, a vector counted as a matrix, and
    attention that is counted without a named core, or not counted with one."""

    class Mixer(torch.nn.Module):
        sharding = ShardingTable({}, attention_cores=cores)

        def __init__(self, *_: object) -> None:
            super().__init__()
            self.mix, self.gain = torch.nn.Linear(16, 24, bias=False), torch.nn.Parameter(torch.ones(16))

    BLOCKS.register("mixer", NoOptions)(Mixer)
    try:
        config = ModelConfig(num_layers=3, hidden_size=16, num_heads=2, vocab_size=50, block=BlockConfig("mixer"))
        matrices, product = 2 * 16 * 24, 2 * 16 * 12 if cores else 0
        found = block_flops(config, 12)
        assert (found.forward, found.backward_weight) == (matrices + 2 * product, matrices)
        assert found.backward_input == matrices + 4 * product
        plain = replace(config, block=BlockConfig())
        ends = parameter_count(plain) - 3 * sum(
            prod(shape) for name, shape in parameter_shapes(plain).items() if name.startswith("blocks.0.")
        )
        assert parameter_count(config) - ends == 3 * (16 * 24 + 16)
    finally:
        BLOCKS._parts.pop("mixer")


def test_a_token_uses_the_experts_that_it_chooses() -> None:
    """Catches active parameters that include all experts, or leave out the router: Mixtral 8x7B, Qwen3-30B-A3B."""
    llama = {"mlp": MLPKind.swiglu, "norm": NormKind.rmsnorm, "bias": False, "tie_embeddings": False}
    mixtral = ModelConfig(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=32000,
        embedding_norm=False, position=Position.rope, moe=MoEConfig(8), **llama,
    )  # fmt: skip
    qwen = replace(
        mixtral, num_layers=48, hidden_size=2048, num_kv_heads=4, head_size=128, qk_norm=True, vocab_size=151936,
        moe=MoEConfig(128, top_k=8, expert_ffn_size=768),
    )  # fmt: skip
    # The published numbers: 46.7B and 12.9B, 30.5B and 3.3B.
    assert parameter_count(mixtral) == 46_702_792_704 and active_parameter_count(mixtral) == 12_879_925_248
    assert parameter_count(qwen) == 30_532_122_624 and round(active_parameter_count(qwen) / 1e9, 2) == 3.35
