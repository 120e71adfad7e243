"""The model: a plain PyTorch GPT/BLOOM without process groups, and its sharding table.

`gpt` defines the blocks and the whole model, `attention`, `rotary`, `mlp`, `moe` (experts) and `layers` (norms,
dropout) their modules; `kv_cache` is for generation. `config` also lists the layers, `sharding` has the sharding table,
and `model_size` counts parameters and FLOPs, all without importing torch; `peak` is the peak rate of a device, the
denominator of MFU.
"""

__all__ = [
    "attention",
    "config",
    "gpt",
    "kv_cache",
    "layers",
    "model_size",
    "moe",
    "moe_config",
    "peak",
    "rope_scaling",
    "rotary",
    "sharding",
]
