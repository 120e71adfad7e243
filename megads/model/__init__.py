"""What is computed: a plain PyTorch GPT/BLOOM without process groups, and the table by which it may be cut.

`gpt` holds the stages and the whole model, `attention`, `norm` and `dropout` what blocks are made of; `kv_cache` is for
generation, `stage_names` lists the stages without torch.
"""

__all__ = ["attention", "config", "dropout", "gpt", "kv_cache", "norm", "stage_names"]
