"""Operators: the Python side of kernels/, each with its reference in plain PyTorch.

`config` defines which implementation computes each operator, `resolve` resolves it for this machine and loads the
kernels, `build` compiles them, `compiler` calls torch.compile, `processor` tells on which CPUs PyTorch's GEMMs are
slow, and `device_cache` caches tensors that are computed once. The other modules are the operators.
"""

__all__ = [
    "activation",
    "adamw",
    "apex",
    "attention",
    "attention_kinds",
    "block_attention",
    "build",
    "compiler",
    "config",
    "cross_entropy",
    "data_kernels",
    "device_cache",
    "dropout",
    "expert_slots",
    "float8",
    "grouped_linear",
    "linear",
    "norm",
    "processor",
    "resolve",
    "rotary",
    "softcap",
    "softmax",
    "token_dispatch",
]
