"""The architectures of transformers that megads imports and exports, and the choice among them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from megads.api import ConfigError, ModelConfig
from megads.tools.convert.architecture import Architecture, Content
from megads.tools.convert.families import experts, gpt, llama

ARCHITECTURES: dict[str, Architecture] = {
    family.model_type: family
    for family in (
        *(gpt.BLOOM, llama.LLAMA, llama.MISTRAL, llama.QWEN3, llama.OLMO2, gpt.GPT_NEOX, gpt.GPT2, llama.QWEN2),
        *(llama.GEMMA, llama.GEMMA2, llama.GEMMA3, llama.OLMO, llama.OLMO3, llama.SMOLLM3, llama.GRANITE, llama.PHI3),
        *(llama.STABLELM, llama.SEED_OSS, llama.COHERE, llama.MINISTRAL, gpt.GPTJ, gpt.PHI, gpt.FALCON, gpt.MPT),
        *(gpt.OPT, gpt.STARCODER2, experts.MIXTRAL, experts.QWEN3_MOE, experts.OLMOE, experts.QWEN2_MOE),
        experts.GLM4_MOE,
    )
}
"""Architectures by model_type, in order of preference."""
_REFUSED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), "its multi-head latent attention (kv_lora_rank)"),
    "gpt_oss": "its experts with biases and a clamped activation (swiglu_limit)",
    "qwen3_next": "its linear attention (linear_num_value_heads)",
    "llama4_text": "its weights before the experts and its attention in chunks (attention_chunk_size)",
}
"""What megads does not compute of architectures with experts that it does not know, by model_type."""
_GENERIC = {
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "rope_parameters",
    "rope_scaling", "auto_map", "pretraining_tp", "_name_or_path", "quantization_config", "cache_implementation",
    "id2label", "label2id", "return_dict", "chunk_size_feed_forward", "task_specific_params",
}  # fmt: skip
"""Keys of config.json that say nothing about the architecture, or that all architectures have."""
_NAMED = 3
"""Keys that a message names."""


def choose_architecture(model: ModelConfig, wanted: str, imported: Any = None) -> Architecture:
    """Returns the architecture to export a model to.

    Args:
        model: the model.
        wanted: model_type of an architecture, or auto.
        imported: model_type of the model that training started from, which auto prefers; None: there is none.

    Raises:
        ConfigError: the architecture, or for auto every architecture, cannot express the model; the message gives the
            reasons, for auto those of the nearest architecture.
    """
    candidates = list(ARCHITECTURES.values()) if wanted == "auto" else [ARCHITECTURES[wanted]]
    candidates.sort(key=lambda some: some.model_type != imported)
    refusals = [(some.refusals(model), some) for some in candidates]
    refused, nearest = min(refusals, key=lambda found: len(found[0]))
    if not refused:
        return nearest
    others = [some.model_type for some in ARCHITECTURES.values() if not some.refusals(model)]
    if wanted != "auto":
        remedy = f"; format={others[0]} can" if others else "; no published architecture that megads knows can"
        raise ConfigError(f"format = {wanted} cannot express the model: {'; '.join(refused)}{remedy}")
    raise ConfigError(
        f"no published architecture that megads knows can express the model; the nearest is {nearest.model_type}: "
        f"{'; '.join(refused)}"
    )


def architecture_of(config_json: Content) -> Architecture:
    """Returns the architecture of a config.json.

    Raises:
        ConfigError: megads does not support the architecture; the message names the nearest one, by model_type
            and the keys of config.json, and the first keys that it lacks.
    """
    kind = config_json.get("model_type")
    for family in ARCHITECTURES.values():
        if kind in (family.model_type, *family.former_types):
            return family
    if isinstance(kind, str) and kind in _REFUSED:
        raise ConfigError(
            f"config.json: model_type = {kind!r}: megads does not compute {_REFUSED[kind]}; of models with experts it "
            f"knows {', '.join(name for name, some in ARCHITECTURES.items() if some.has_experts)}"
        )
    inner = config_json.get("text_config")
    content = inner if isinstance(inner, Mapping) else config_json
    keys = [key for key in content if key not in _GENERIC]
    ours = {one.model_type: one.keys() for one in ARCHITECTURES.values()}
    name = str(content.get("model_type"))
    nearest = max(ours, key=lambda one: len(ours[one] & set(keys)) + _same_letters(one, name))
    # Values such as null and false usually switch off what a family need not have.
    others = [key for key in keys if key not in ours[nearest] and content[key]]
    named = ", ".join(f"{key} = {reprlib.repr(content[key])}" for key in others[:_NAMED])
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    told = "model_type is missing" if kind is None else f"model_type = {kind!r}: megads has no such family"
    if content is inner:
        told += f" (it consists of several models; that of text has model_type = {name!r})"
    elif config_json.get("is_encoder_decoder"):
        told += " (an encoder with a decoder; megads has decoders only)"
    if ours[nearest] & set(keys):
        told += f"; the nearest by name and keys is {nearest}, which "
        told += f"does not have {named}{more}" if named else "has all of them"
    raise ConfigError(f"config.json: {told}. megads knows {', '.join(sorted(ours))}")


def _same_letters(one: str, other: str) -> int:
    """Number of equal letters at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
