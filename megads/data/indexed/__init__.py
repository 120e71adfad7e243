"""The on-disk format of tokenized datasets: Megatron's, plus a sidecar and a copy of the tokenizer.

`dataset` reads and `writer` writes them; `sidecar` describes a dataset; `recorded` detects changes of a dataset between
starts of a run; `run_tokenizer` is the run's own copy of the tokenizer. `stream` opens datasets, also those in object
storage, which `megads.tools.remote` reads. `verified_once` lets one rank verify large files for all ranks of a node.
"""

__all__ = ["dataset", "recorded", "run_tokenizer", "sidecar", "stream", "verified_once", "writer"]
"""Modules that packages other than `megads.data` may import."""
