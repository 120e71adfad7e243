"""Checkpoints: a manifest, an atomic store, and reads that reshard.

`hook` saves during a run, `store` writes, `writer` does so while the run trains on, `read` finds and loads, `initial`
finds weights for a new run to start from; `retention` says which checkpoints stay; `manifest` is what a checkpoint says
of itself, `tensor_file` the format of its files.
"""

__all__ = ["config", "hook", "initial", "manifest", "read", "retention", "store", "tensor_file", "writer"]
