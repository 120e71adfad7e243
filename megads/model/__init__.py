"""The model: a plain PyTorch GPT/BLOOM without process groups, and its sharding table.

`gpt` defines the layers and the whole model, `attention`, `norm` and `dropout` the modules of blocks; `kv_cache` is for
generation, and `stage_names` lists the layers without importing torch.
"""

__all__ = ["attention", "config", "dropout", "gpt", "kv_cache", "norm", "stage_names"]
