"""Checkpoints: a manifest, an atomic store, and reads that reshard.

`hook` saves during a run, `store` writes, `writer` does so while the run trains on, of an `image` of the state;
`local` keeps images in the node's memory (`local_files`) for the next start, which `local_saves` makes; `replicas` has
copies of them on other nodes, by a `replica_process` and `replica_transfer`. `read` finds and loads, `shared_read`
reads for all ranks of a layout, `initial` finds weights for a new run to start from, `fresh_start` says where a run
that loads nothing begins, `retention` says which
checkpoints stay; `manifest` is what a checkpoint says of itself, `rank_file` what a rank's file does, `rectangle` the
geometry of parts, and `tensor_file` the format of files of tensors. `remote` is a store that fsspec reaches, `upload`
brings checkpoints there, `download` brings them back, and `remote_lease` says who uploads.
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
