"""Which tokens a run trains on, in which order, as micro-batches.

`datasets` opens what a config names; `samples` and `packed` number the samples of one dataset, `megatron` in
Megatron-LM's order; `blend` makes one stream of several; `batch_size` and `sampler` deal it to steps and ranks; `runs`
finds the tokens, and `loader` reads them. `index_maps` and `cached_arrays` keep the orders on disk. Everything but
`loader` can be imported without torch.
"""

__all__ = ["batch_size", "blend", "datasets", "lengths", "loader", "packed", "runs", "sampler", "samples"]
"""Modules that rooms outside of data may import."""
