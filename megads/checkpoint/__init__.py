"""Checkpoints: a manifest, an atomic store, and reads that reshard.

Saving: `config` decides when a run saves and which checkpoints it keeps, `hook` saves, `store` writes and commits
synchronously, `writer` writes asynchronously from an `image` of the state. In memory: `local_saves` writes local
checkpoints, `local` finds them at the next start, `local_files` defines their files; `replicas`, `replica_process` and
`replica_transfer` copy them to other nodes. Loading: `read` finds and loads, `shared_read` reads once for all
data-parallel replicas, `initial` finds initial weights for a new run, and `fresh_start` records where a run that loads
nothing begins. Format: `manifest` describes a checkpoint, and `rank_file` the file of one rank and the geometry
of shards. Copies in an object store are made by `megads.tools.remote`.
"""

__all__ = [
    "config",
    "fresh_start",
    "hook",
    "image",
    "initial",
    "local",
    "local_files",
    "local_saves",
    "manifest",
    "rank_file",
    "read",
    "shared_read",
    "store",
    "writer",
]
