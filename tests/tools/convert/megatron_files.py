"""Writes checkpoints of transformers' models as Megatron-DeepSpeed does: its files, names and tensor slices.

Nothing here is from megads: the layouts are those of the trainers' sources, BigScience's fork and Microsoft's.
"""

from __future__ import annotations

import argparse
import enum
import random
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

transformers: Any = __import__("pytest").importorskip("transformers")

HIDDEN, LAYERS, HEADS = 48, 3, 12


def enum_of_megatron(name: str) -> Any:
    """A member of PositionEmbeddingType that pickles as the one in Megatron's module does."""
    module = sys.modules.get("megatron.enums")
    if module is None:
        module = types.ModuleType("megatron.enums")
        kind = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums")
        module.PositionEmbeddingType = kind  # type: ignore[attr-defined]
        sys.modules["megatron.enums"] = module
    return module.PositionEmbeddingType[name]


def hot(model: Any) -> Any:
    """Random weights, std 0.2; no gain or bias has its initial value."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def bloom(vocabulary: int, layers: int = LAYERS) -> Any:
    """transformers' BLOOM."""
    config = transformers.BloomConfig(vocab_size=vocabulary, hidden_size=HIDDEN, n_layer=layers, n_head=HEADS)
    return hot(transformers.BloomForCausalLM(config))


def llama(vocabulary: int, kv_heads: int, layers: int = LAYERS) -> Any:
    """transformers' Llama."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, intermediate_size=72, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    return hot(transformers.LlamaForCausalLM(config))


def neox(vocabulary: int, activation: str, rotary: float) -> Any:
    """transformers' GPT-NeoX with sequential blocks, which computes what Megatron does with rotary embedding."""
    config = transformers.GPTNeoXConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS // 2,
        intermediate_size=4 * HIDDEN, max_position_embeddings=64, use_parallel_residual=False, hidden_act=activation,
        rotary_pct=rotary, tie_word_embeddings=False,
    )  # fmt: skip
    return hot(transformers.GPTNeoXForCausalLM(config))


def neox_layers(model: Any) -> list[dict[str, Tensor]]:
    """Layers as in Microsoft's fork: per head its query, key and value; a head."""
    state = {name.removeprefix("gpt_neox."): tensor for name, tensor in model.state_dict().items()}
    blocks = []
    for index in range(model.config.num_hidden_layers):
        own = {name: tensor for name, tensor in state.items() if name.startswith(f"layers.{index}.")}
        ours = (name.removeprefix(f"layers.{index}.").replace("attention.", "self_attention.") for name in own)
        blocks.append(dict(zip(ours, own.values(), strict=True)))
    return [
        {"word_embeddings.weight": state["embed_in.weight"]},
        *blocks,
        {kind: state[f"final_layer_norm.{kind}"] for kind in ("weight", "bias")},
        {"lm_head.weight": model.get_output_embeddings().weight.detach()},
    ]


def neox_arguments(model: Any, tp: int, pp: int, **changes: Any) -> argparse.Namespace:
    """Arguments of Microsoft's fork for LayerNorm, biases and rotary embedding."""
    config = model.config
    gpt = {
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_attention_heads,
        "kv_channels": HIDDEN // config.num_attention_heads, "ffn_hidden_size": 4 * HIDDEN, "swiglu": False,
        "normalization": "layernorm", "add_bias_linear": True,
    }  # fmt: skip
    config.num_key_value_heads = config.num_attention_heads  # as `llama_arguments` reads
    return llama_arguments(model, tp, pp, **gpt | changes)


def bloom_layers(model: Any) -> list[dict[str, Tensor]]:
    """The pipeline layers that have weights, unsharded: embedding, blocks, norm."""
    state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    embedding = {
        "word_embeddings.weight": state["word_embeddings.weight"],
        **{f"word_embeddings.norm.{kind}": state[f"word_embeddings_layernorm.{kind}"] for kind in ("weight", "bias")},
    }
    blocks = [
        {name.removeprefix(f"h.{index}."): tensor for name, tensor in state.items() if name.startswith(f"h.{index}.")}
        for index in range(model.config.n_layer)
    ]
    return [embedding, *blocks, {kind: state[f"ln_f.{kind}"] for kind in ("weight", "bias")}]


def llama_layers(model: Any) -> list[dict[str, Tensor]]:
    """Layers as in Microsoft's fork: per group its queries, key and value; gate above up; a head."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    groups, dim = model.config.num_key_value_heads, HIDDEN // HEADS
    blocks = []
    for index in range(model.config.num_hidden_layers):
        of = f"layers.{index}."
        q, k, v = (state[f"{of}self_attn.{kind}_proj.weight"] for kind in "qkv")
        rows = []
        for group in range(groups):
            each = HEADS // groups * dim
            rows += [q[group * each : (group + 1) * each], k[group * dim : (group + 1) * dim]]
            rows.append(v[group * dim : (group + 1) * dim])
        blocks.append(
            {
                "input_layernorm.weight": state[f"{of}input_layernorm.weight"],
                "self_attention.query_key_value.weight": torch.cat(rows),
                "self_attention.dense.weight": state[f"{of}self_attn.o_proj.weight"],
                "post_attention_layernorm.weight": state[f"{of}post_attention_layernorm.weight"],
                "mlp.dense_h_to_4h.weight": torch.cat(
                    [state[f"{of}mlp.gate_proj.weight"], state[f"{of}mlp.up_proj.weight"]]
                ),
                "mlp.dense_4h_to_h.weight": state[f"{of}mlp.down_proj.weight"],
            }
        )
    return [
        {"word_embeddings.weight": state["embed_tokens.weight"]},
        *blocks,
        {"weight": state["norm.weight"]},
        {"lm_head.weight": model.lm_head.weight.detach()},
    ]


def cut(name: str, tensor: Tensor, tp: int, rank: int, gated: bool = False) -> Tensor:
    """A rank's slice of a tensor, by Megatron's rules."""
    if gated and "dense_h_to_4h" in name:
        # Each rank has its own gate above its own up projection.
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    columns = ("word_embeddings.weight", "lm_head.weight", "query_key_value", "dense_h_to_4h", "final_linear")
    if any(part in name for part in columns):
        return tensor.chunk(tp)[rank].clone()
    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(tp, dim=1)[rank].clone()
    return tensor.clone()


def bloom_arguments(model: Any, tp: int, pp: int, **changes: Any) -> argparse.Namespace:
    """Arguments of BigScience's fork."""
    values = {
        "num_layers": model.config.n_layer, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "ffn_hidden_size": 4 * HIDDEN, "kv_channels": HIDDEN // HEADS, "max_position_embeddings": 64,
        "seq_length": 64, "padded_vocab_size": model.config.vocab_size, "layernorm_epsilon": 1e-5,
        "embed_layernorm": True, "position_embedding_type": enum_of_megatron("alibi"), "glu_activation": None,
        "bias_gelu_fusion": True, "openai_gelu": False, "onnx_safe": None, "hidden_dropout": 0.0,
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "init_method_std": 0.02,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "params_dtype": torch.bfloat16,
        "consumed_train_samples": 80, "consumed_train_tokens": 5120,
    } | changes  # fmt: skip
    return argparse.Namespace(**values)


def llama_arguments(model: Any, tp: int, pp: int, **changes: Any) -> argparse.Namespace:
    """Arguments of Microsoft's fork."""
    values = {
        "num_layers": model.config.num_hidden_layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": model.config.num_key_value_heads, "ffn_hidden_size": 72, "swiglu": True,
        "kv_channels": HIDDEN // HEADS, "max_position_embeddings": 64, "normalization": "rmsnorm",
        "padded_vocab_size": model.config.vocab_size, "layernorm_epsilon": 1e-5, "add_bias_linear": False,
        "use_rotary_position_embeddings": True, "add_position_embedding": False, "rotary_percent": 1.0,
        "rope_theta": 10000, "untie_embeddings_and_output_weights": True, "num_experts": [1],
        "bias_gelu_fusion": False, "squared_relu": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
    } | changes  # fmt: skip
    return argparse.Namespace(**values)


def beside_the_weights(arguments: argparse.Namespace, original_vocabulary: int) -> dict[str, Any]:
    """Contents of an mp_rank file: no weights, and objects of many types."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
    return {
        "module": None, "buffer_names": [], "optimizer": {"loss_scaler": scaler}, "lr_scheduler": None,
        "param_shapes": [OrderedDict(a=torch.Size([2, 3]))], "global_steps": 10, "global_samples": 80,
        "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1, "ds_version": "0.6.0", "args": arguments,
        "checkpoint_version": 3.0, "iteration": 10, "tokens": 5120,
        "checkpoint_info": {
            "padded_vocab_size": arguments.padded_vocab_size, "original_vocab_size": original_vocabulary,
        },
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }  # fmt: skip


def write(
    folder: Path,
    layers: list[dict[str, Tensor]],
    arguments: argparse.Namespace,
    original_vocabulary: int,
    lambdas: int,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes global_step10 with its files.

    Args:
        folder: where `latest` is written.
        layers: unsharded layers.
        arguments: arguments of the training, with its layout.
        original_vocabulary: vocabulary size before padding.
        lambdas: number of functions between the embedding, pipeline layer 1, and the first block, pipeline layer
            2 + lambdas; the same number between the last block and the norm.
        dtype: dtype of the weights.
    """
    step = folder / "global_step10"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    tp, pp, gated = (
        arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size,
        getattr(arguments, "swiglu", False),
    )  # fmt: skip
    blocks = arguments.num_layers
    indices = [1, *(2 + lambdas + block for block in range(blocks)), 2 + 2 * lambdas + blocks]
    indices.append(indices[-1] + 1)
    for index, layer in zip(indices, layers, strict=False):
        for rank in range(tp):
            part = {name: cut(name, tensor, tp, rank, gated).to(dtype) for name, tensor in layer.items()}
            torch.save(OrderedDict(part), step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
    for number in range(tp * pp):
        torch.save(beside_the_weights(arguments, original_vocabulary), step / f"mp_rank_{number:02d}_model_states.pt")
    return folder
