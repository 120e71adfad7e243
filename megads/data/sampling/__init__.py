"""Which tokens a run trains on, in which order, as micro-batches.

A sample has several numbers. Each is a function of the one before, the config and the datasets, so a checkpoint stores
only the number of samples consumed, and neither the layout nor a resume can change them:

1. *Sample id*: 0, 1, 2, ... in the order of training, without gaps (`BatchInfo.sample_ids`; `samples` in metrics.jsonl
   counts them). `loader.step_ids` says which belong to a step, a data-parallel rank and a micro-batch.
2. *Stream index*: position in the training stream, which also has the samples that data.skip leaves out
   (`sampler.Skips.apply`). Blends and training phases begin at stream indices.
3. *Dataset, and index in that dataset's stream* of all epochs (`blend.BlendedSamples.place`). After a change of the
   sample length `blend.ContinuedOrder` shifts the index. A single dataset that needs none of this is not wrapped in
   `BlendedSamples`: its index is the sample id.
4. *Key*: epoch, and row of the epoch's sample index, Megatron's sample_idx (`index_maps.EpochMap`), or bin if documents
   are packed. The shuffle is in this step. `sample_keys` returns keys, and `batch_hash` hashes them: ids are the same
   in every run, keys say which text it is.
5. *Runs*: ranges of tokens in `.bin`, each with its place in the batch (`runs.Runs`); `runs.copy_tokens` reads them.

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
