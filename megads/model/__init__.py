"""The model: a plain PyTorch GPT/BLOOM without process groups, and its sharding table.

`gpt` defines the blocks and the whole model, `attention` and `layers` (norms, dropout) their modules; `kv_cache` is for
generation, and `config` also lists the layers without importing torch.
"""

__all__ = ["attention", "config", "gpt", "kv_cache", "layers"]
