"""What Hugging Face's BloomForCausalLM calls the parameters of a model with ALiBi and an embedding norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

_OUTER = {
    "embedding.word": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
}
_BLOCK = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.dense": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def bloom_name(name: str) -> str:
    """Their name of one of our parameters; no rows are permuted, both order QKV by [head, (q, k, v), head dim].

    Raises:
        KeyError: BLOOM has no such parameter.
    """
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, layer, inner = module.split(".", 2)
        return f"transformer.h.{layer}.{_BLOCK[inner]}.{kind}"
    return f"{_OUTER[module]}.{kind}"


def bloom_state(weights: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Our weights under their names.

    Args:
        weights: of a model with tied embeddings, by our names.
        wanted: names of their parameters, each once.

    Raises:
        ValueError: a parameter on one side has no counterpart on the other.
    """
    found = {bloom_name(name): weight for name, weight in weights.items()}
    apart = set(found) ^ set(wanted)
    if apart:
        raise ValueError(f"parameters of only one of the two models: {sorted(apart)}; are they of the same shape?")
    return found
