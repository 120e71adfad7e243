"""Checkpoints: a manifest, an atomic store, and reads that reshard.

Saving: `config` decides when a run saves and which checkpoints it keeps, `hook` saves. `store` describes a save, which
the ranks write while training waits; or `async_saves` copies the state to an `image`, and each rank's `writer` process
writes it. In memory: `local_saves` makes a local checkpoint of every copy, `local` finds them at the next start,
`local_files` defines their files; `replication` is what they ask of the tool that copies them to other nodes.

Loading: `read` finds and loads, `shared_read` reads once for all data-parallel replicas, `initial` finds initial
weights for a new run, and `fresh_start` records where a run that loads nothing begins.

Format: `manifest` describes a checkpoint, `rank_file` the file of one rank and the geometry of shards.
`megads.tools.remote` makes copies on other nodes and in an object store.
"""

__all__ = [
    "async_saves",
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
    "replication",
    "shared_read",
    "store",
    "writer",
]
