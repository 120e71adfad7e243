"""Writes the optimizer state of a pipeline module as DeepSpeed's ZeRO-1 does, for every rank of a layout."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tools.convert import megatron_files as files

UNIVERSAL_INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.*"],
    "tp_replicated_parameter_patterns": [
        r"tied_modules.embed.word_embeddings.norm.*", r"\d+.input_layernorm.*", r"\d+.post_attention_layernorm.*",
        r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias", r"\d+.weight", r"\d+.bias",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"],
}  # fmt: skip
"""Megatron-DeepSpeed's universal checkpoint info for BLOOM's parameters."""


def stages_of(layers: list[dict[str, Tensor]], pp: int, lambdas: int = 1) -> list[dict[str, Tensor]]:
    """Returns the parameters of each stage by DeepSpeed's names; the last stage also has the tied embedding."""
    blocks = len(layers) - 2
    embedding = {f"tied_modules.embed.{name}": tensor for name, tensor in layers[0].items()}
    stages: list[dict[str, Tensor]] = [{} for _ in range(pp)]
    stages[0] |= embedding
    for block, layer in enumerate(layers[1:-1]):
        stage = stages[block * pp // blocks]
        stage |= {f"{2 + lambdas + block}.{name}": tensor for name, tensor in layer.items()}
    stages[-1] |= {f"{2 + 2 * lambdas + blocks}.{name}": tensor for name, tensor in layers[-1].items()}
    if pp > 1:
        stages[-1] |= embedding
    return stages


def write_optimizer_state(step: Path, stages: list[dict[str, Tensor]], tp: int, dp: int) -> None:
    """Adds the files of the optimizer state; the first moment is half of the weight, the second its square.

    Args:
        step: folder with mp_rank_* files, which get the shapes of their parameters.
        stages: whole parameters of each stage, by DeepSpeed's names.
        tp: number of tensor-parallel ranks.
        dp: number of data-parallel ranks.
    """
    for stage, whole in enumerate(stages):
        for rank in range(tp):
            parts = {name: files.cut(name, tensor, tp, rank) for name, tensor in whole.items()}
            groups = [
                {name: part for name, part in parts.items() if (part.dim() > 1) is matrices}
                for matrices in (True, False)
            ]
            number = stage * tp + rank
            path = step / f"mp_rank_{number:02d}_model_states.pt"
            state = torch.load(path, weights_only=False)
            info = {
                "original_vocab_size": state.get("checkpoint_info", {}).get("original_vocab_size"),
                **UNIVERSAL_INFO,
            }
            shapes = [OrderedDict((name, part.shape) for name, part in group.items()) for group in groups]
            torch.save(state | {"param_shapes": shapes, "universal_checkpoint_info": info}, path)
            for data_rank in range(dp):
                torch.save(
                    {"optimizer_state_dict": _slice(groups, data_rank, dp), "ds_version": "0.19.8"},
                    step / f"bf16_zero_pp_rank_{data_rank}_mp_rank_{number:02d}_optim_states.pt",
                )


def _slice(groups: list[dict[str, Tensor]], data_rank: int, dp: int) -> dict[str, Any]:
    from deepspeed.utils.tensor_fragment import fragment_address

    states, weights, mappings = {}, [], []
    for number, group in enumerate(groups):
        flat = torch.cat([part.reshape(-1) for part in group.values()])
        flat = torch.cat([flat, torch.zeros(-len(flat) % dp)])
        length = len(flat) // dp
        first = data_rank * length
        mapping, start = OrderedDict(), 0
        for name, part in group.items():
            begin, end = max(start, first), min(start + part.numel(), first + length)
            if begin < end:
                mapping[name] = fragment_address(numel=end - begin, start=begin - first)
            start += part.numel()
        own = flat[first : first + length].clone()
        weights.append(own)
        mappings.append(mapping)
        states[number] = {"step": torch.tensor(9.0), "exp_avg": own / 2, "exp_avg_sq": own * own}
    return {
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": states, "param_groups": [{"lr": 1e-3, "params": [0]} for _ in groups]},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": [0 for _ in groups],
        "partition_count": [dp for _ in groups],
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }
