"""Checkpoints elsewhere: in an object store (checkpoint.upload, a URL in place of a folder), on another node.

`store` accesses a store through fsspec; `upload` and `download` copy a checkpoint. `run_storage` is what the launcher
calls (`megads.launch.object_storage`): it restores lost checkpoints, and runs an `uploader` process next to the ranks.
`commands` implements `megads checkpoint` for URLs.

`replicas` keeps copies of local checkpoints in the memory of other nodes (checkpoint.replicate), with a
`replica_process` next to each rank and the protocol in `replica_transfer`.
"""

__all__ = ["commands"]
