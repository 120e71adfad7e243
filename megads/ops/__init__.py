"""Operators: the Python side of kernels/, each beside its reference in plain torch.

`config` says which implementation computes each operator, `resolve` decides it for this machine and loads the kernels,
`build` compiles them, `autotune` compares implementations on a device, `processor` says where torch multiplies slowly,
`device_cache` keeps tensors that are made once.
The other modules are the operators themselves.
"""

__all__ = [
    "activation",
    "adamw",
    "apex",
    "attention",
    "attention_kinds",
    "autotune",
    "build",
    "config",
    "cross_entropy",
    "data_kernels",
    "device_cache",
    "dropout",
    "linear",
    "norm",
    "processor",
    "resolve",
    "rotary",
    "softcap",
    "softmax",
]
