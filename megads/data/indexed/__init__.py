"""The on-disk format of tokenised datasets: Megatron's, with a sidecar and the tokenizer beside it.

`dataset` reads and `writer` writes them; `sidecar` is what lies beside them; `recorded` tells a later start of a run
whether they changed; `run_tokenizer` is the run's own copy of their tokenizer; `actions` is what `megads dataset` does.
`stream` reads datasets in object storage, from files and blocks that `remote_files` fetches and `block_cache` keeps.
`verified_once` spares every rank but one the reading of large files, and is for the rooms of data only.
"""

__all__ = ["actions", "dataset", "recorded", "run_tokenizer", "sidecar", "stream", "writer"]
"""Modules that rooms outside of data may import."""
