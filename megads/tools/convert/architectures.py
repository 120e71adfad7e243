"""The architectures of transformers that megads imports and exports, and the choice among them."""

from __future__ import annotations

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
_GENERIC = [
    "model_type",
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
    "auto_map",
    "pretraining_tp",
    "_name_or_path",
]
"""Keys of config.json that say nothing about the architecture, or that all architectures have."""


def choose_architecture(model: ModelConfig, wanted: str) -> Architecture:
    """Returns the architecture to export a model to.

    Args:
        model: the model.
        wanted: model_type of an architecture, or auto.

    Raises:
        ConfigError: the architecture, or for auto every architecture, cannot express the model; the message gives the
            reasons, for auto those of the nearest architecture.
    """
    candidates = list(ARCHITECTURES.values()) if wanted == "auto" else [ARCHITECTURES[wanted]]
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
        ConfigError: megads does not support the architecture; the message names the nearest one, by the keys of
            config.json, and the first key that it lacks.
    """
    kind = config_json.get("model_type")
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind]
    if kind in _REFUSED:
        raise ConfigError(
            f"config.json: model_type = {kind!r}: megads does not compute {_REFUSED[kind]}; of models with experts it "
            f"knows {', '.join(name for name, some in ARCHITECTURES.items() if some.has_experts)}"
        )
    keys = [key for key in config_json if key not in _GENERIC]
    nearest = max(ARCHITECTURES.values(), key=lambda one: len(one.keys() & set(keys)) - len(one.keys() - set(keys)))
    known = nearest.keys()
    other = next((f"; it has no {key} = {config_json[key]!r}" for key in keys if key not in known), "")
    raise ConfigError(
        f"config.json: model_type = {kind!r}: megads knows {', '.join(ARCHITECTURES)}; by its keys the nearest is "
        f"{nearest.model_type}{other}"
    )
