"""Checkpoints outside of the run directory: in an object store (checkpoint.upload, a URL in place of a folder).

`store` accesses a store through fsspec; `upload` and `download` copy a checkpoint. `run_storage` is what the launcher
calls (`megads.launch.object_storage`): it restores lost checkpoints, and runs an `uploader` process next to the ranks.
`commands` implements `megads checkpoint` for URLs.
"""

__all__ = ["commands"]
