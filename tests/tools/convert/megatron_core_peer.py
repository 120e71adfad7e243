"""Megatron core's own GPT model and its own distributed checkpoints, on CPU ranks. Run by `run_ranks`."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megads.ops.compiler import quote_library_path

VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH = 320, 48, 12, 2, 16
LLAMA = {
    "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False, "ffn_hidden_size": 72,
    "position_embedding_type": "rope", "rotary_base": 500, "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 4,
    "bias_gelu_fusion": False,
}  # fmt: skip
GPT = {
    "normalization": "LayerNorm", "norm_epsilon": 1e-5, "swiglu": False, "add_bias_linear": True,
    "ffn_hidden_size": 4 * HIDDEN, "position_embedding_type": "learned_absolute", "rotary_base": 10000,
    "rotary_percent": 1.0, "untie_embeddings_and_output_weights": False, "group_query_attention": False,
    "num_query_groups": 1, "bias_gelu_fusion": True,
}  # fmt: skip

# Half of a head's features rotated; without the fused GELU megatron.core computes the exact one.
PARTIAL = {**GPT, "position_embedding_type": "rope", "rotary_percent": 0.5, "bias_gelu_fusion": False}
RELU2 = {**PARTIAL, "squared_relu": True}


def arguments(shape: dict[str, Any], tp: int, pp: int) -> argparse.Namespace:
    """Returns the command line arguments that Megatron-LM saves, as far as they define the model."""
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=HIDDEN // HEADS,
        max_position_embeddings=LENGTH, padded_vocab_size=VOCABULARY, hidden_dropout=0.0, attention_dropout=0.0,
        init_method_std=0.02, qk_layernorm=False, num_experts=None, apply_layernorm_1p=False, openai_gelu=False,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, ckpt_format="torch_dist",
        consumed_train_samples=40, params_dtype=torch.bfloat16,
        **{"squared_relu": False, **shape},
    )  # fmt: skip


def _build(args: argparse.Namespace) -> Any:
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    activation = squared_relu if args.squared_relu else F.silu if args.swiglu else F.gelu
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=args.ffn_hidden_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None, use_cpu_initialization=True,
        normalization=args.normalization, layernorm_epsilon=args.norm_epsilon, gated_linear_unit=args.swiglu,
        activation_func=activation, add_bias_linear=args.add_bias_linear, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=args.bias_gelu_fusion, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=args.tensor_model_parallel_size, masked_softmax_fusion=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )  # fmt: skip
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base, rotary_percent=args.rotary_percent,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=first, post_process=last, parallel_output=False,
    ).eval()  # fmt: skip
    rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {stage} {own}".encode()))
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data.normal_(centre, 0.2, generator=generator)
    return model


@torch.no_grad()
def _logits(model: Any, tp: int) -> np.ndarray | None:
    """Returns the logits of the whole model on its last stage, and None on the others."""
    from megatron.core import parallel_state

    ids = tokens()
    positions = torch.arange(LENGTH).expand_as(ids)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    rank = dist.get_rank()
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(LENGTH, len(ids), HIDDEN)
        dist.recv(hidden, rank - tp)
        model.set_input_tensor(hidden)
    found = model(ids, positions, mask)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(found.contiguous(), rank + tp)
        return None
    return found.numpy()  # type: ignore[no-any-return]


def tokens() -> torch.Tensor:
    """Returns the batch whose logits are compared."""
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def save(folder: str, shape: dict[str, Any], tp: int, pp: int) -> np.ndarray | None:
    """Saves a model with Megatron core; returns its logits."""
    # Megatron core synchronizes with a device and starts a process even on a CPU.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    # Megatron core compiles its fused GELU itself.
    quote_library_path()
    # The random state tracker needs a GPU; there is no dropout here.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tp, pp)
    args = arguments(shape, tp, pp)
    model = _build(args)
    state = {
        "model": model.sharded_state_dict(prefix=""), "args": args, "iteration": 5, "checkpoint_version": 3.0,
    }  # fmt: skip
    dist_checkpointing.save(state, folder)
    return _logits(model, tp)
