"""`megads why` and `megads dataset`: what a step trained on, and how long a dataset's documents are."""

__all__ = ["dataset_lengths", "why", "why_config", "why_output"]
