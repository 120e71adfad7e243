"""From raw text to micro-batches: tokenizer, indexed dataset, index maps, sampler, loader."""
