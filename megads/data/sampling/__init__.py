"""Which tokens a run trains on, in which order, as micro-batches.

`datasets` opens the datasets of a config; `samples` and `packed` define the samples of one dataset; `blend` combines
several datasets into one stream; `batch_size` and `sampler` assign samples to steps and ranks; `runs` locates the
tokens, and `loader` reads them. `index_maps` and `cached_arrays` store the orders on disk. Megatron-LM's order is in
`megads.tools.megatron_order`. Everything except `loader` can be imported without torch.
"""

__all__ = [
    "batch_size",
    "blend",
    "cached_arrays",
    "datasets",
    "index_maps",
    "loader",
    "packed",
    "runs",
    "sampler",
    "samples",
]
"""Modules that packages other than `megads.data` may import."""
