"""Checkpoints: a manifest, an atomic store, and reads that reshard.

Saving: `hook` saves during a run, `store` writes and commits synchronously, `writer` writes asynchronously from an
`image` of the state, and `retention` decides which checkpoints are kept. In memory: `local_saves` writes local
checkpoints, `local` finds them at the next start, `local_files` defines their files; `replicas`, `replica_process` and
`replica_transfer` copy them to other nodes. Loading: `read` finds and loads, `shared_read` reads once for all
data-parallel replicas, `initial` finds initial weights for a new run, and `fresh_start` records where a run that loads
nothing begins. Format: `manifest` describes a checkpoint, `rank_file` the file of one rank, `tensor_file` the file
format, and `rectangle` the geometry of shards. Remote storage: `remote` accesses a store through fsspec, `upload` and
`download` copy checkpoints, and `remote_lease` decides which process uploads.
"""

__all__ = [
    "config",
    "download",
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
    "rectangle",
    "remote",
    "remote_lease",
    "retention",
    "shared_read",
    "store",
    "tensor_file",
    "upload",
    "writer",
]
