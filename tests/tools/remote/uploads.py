"""Uploads and fetches checkpoints of several files."""

from __future__ import annotations

from pathlib import Path

from megads.tools.remote.download import restore_newest
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import CheckpointUpload, RemoteCheckpoint, pin_checkpoint, remote_checkpoints, unpin
from tests.checkpoint.small_checkpoints import seed_of


def upload(store: RemoteStore, folder: Path, node: int = 0, num_nodes: int = 1) -> CheckpointUpload:
    """Uploads one checkpoint as the uploader does."""
    pin = pin_checkpoint(folder)
    assert pin is not None
    upload = CheckpointUpload(store, folder.parent.parent, pin, node=node, num_nodes=num_nodes)
    if node == 0:
        upload.open()
    upload.send()
    if node == 0:
        upload.commit()
        unpin(pin)
    return upload


def complete(store: RemoteStore) -> list[RemoteCheckpoint]:
    """Checkpoints that a reader considers complete, newest first."""
    found = [checkpoint for checkpoint in remote_checkpoints(store).values() if checkpoint.sequence]
    return sorted(found, key=lambda checkpoint: checkpoint.sequence, reverse=True)


def fetched_seeds(store: RemoteStore, folder: Path) -> dict[int, int]:
    """Fetches every complete checkpoint separately; returns the seed of its tensors, by step."""
    seeds = {}
    for checkpoint in complete(store):
        run_dir = folder / f"fetched_{checkpoint.step}"
        restore_newest(store, run_dir, [checkpoint])
        seeds[checkpoint.step] = seed_of(run_dir)
    return seeds
