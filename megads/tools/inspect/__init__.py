"""`megads why` and `megads dataset`: the samples of a training step, and the document lengths of a dataset."""

__all__ = ["dataset_lengths", "why", "why_config", "why_output"]
