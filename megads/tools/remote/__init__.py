"""Data and checkpoints elsewhere: in an object store (a URL in place of a path, checkpoint.upload), on another node.

`store` accesses a store through fsspec; `upload` and `download` copy a checkpoint. `run_storage` is what the launcher
calls (`megads.launch.object_storage`): it restores lost checkpoints, and runs an `uploader` process next to the ranks.
`commands` implements `megads checkpoint` for URLs.

`stream` opens datasets at URLs (`megads.data.indexed.stream`): `remote_files` fetches files and blocks, and caches
blocks on the node.

`replicas` keeps copies of local checkpoints in the memory of other nodes (checkpoint.replicate), with a
`replica_process` next to each rank and the protocol in `replica_transfer`.
"""

__all__ = ["commands"]
