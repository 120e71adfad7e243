"""Checkpoints: a manifest, an atomic store, and reads that reshard.

`hook` saves during a run, `store` writes, `read` finds and loads; `manifest` is what a checkpoint says of itself,
`tensor_file` the format of its files.
"""

__all__ = ["config", "hook", "manifest", "read", "store", "tensor_file"]
