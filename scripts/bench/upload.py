"""MB/s of a checkpoint's upload and download, and of s3fs's plain put, against moto's S3 server on this machine.

python -m scripts.bench.upload [--mib 256] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import fsspec
import torch

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_parts
from megads.engine.interface import Shard
from megads.tools.remote.download import newest_first, restore_newest
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import CheckpointUpload, pin_checkpoint, remote_checkpoints, unpin
from tests.s3_server import BUCKET, s3_server


def main() -> None:
    """Alternates upload, download and plain put, and prints the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"plain put (s3fs)": [], "upload, verified": [], "fetch, verified": []}
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name) / "s3") as server:
        os.environ.update(server.variables)
        folder, rows = Path(name), given.mib * 2**20 // 4 // 1024
        state = {"step": 1, "samples": 1, "tokens": 1}
        shard = Shard("weight/w", (rows, 1024), (0, 0), torch.randn(rows, 1024))
        checkpoint = save_parts(folder / "run", [[shard]], RunRecord(state, 1, "", {}, {}))
        file = checkpoint / "rank_00000.safetensors"
        plain = fsspec.filesystem("s3")
        for number in range(given.rounds):
            begin = time.perf_counter()
            plain.put_file(str(file), f"{BUCKET}/plain/{number}")
            seconds["plain put (s3fs)"].append(time.perf_counter() - begin)
            plain.rm_file(f"{BUCKET}/plain/{number}")
            store = RemoteStore(f"{server.url}/{number}")
            begin = time.perf_counter()
            pin = pin_checkpoint(checkpoint)
            assert pin is not None
            upload = CheckpointUpload(store, folder / "run", pin)
            upload.open()
            upload.send()
            upload.commit()
            seconds["upload, verified"].append(time.perf_counter() - begin)
            unpin(pin)
            begin = time.perf_counter()
            restore_newest(store, folder / f"back{number}", newest_first(remote_checkpoints(store)))
            seconds["fetch, verified"].append(time.perf_counter() - begin)
        size = file.stat().st_size / 1e6
        for what, found in seconds.items():
            print(f"{what:20} {size / median(found):8,.0f} MB/s   ({', '.join(f'{s:.2f}' for s in found)} s)")


if __name__ == "__main__":
    main()
    # Otherwise s3fs's thread waits for its connections.
    sys.stdout.flush()
    os._exit(0)
