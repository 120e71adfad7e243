from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megads.data.blend_config import DatasetConfig
from megads.data.config import DataConfig
from megads.data.datasets import open_datasets
from megads.data.indexed import IndexedDataset, bin_path, idx_path
from megads.data.sidecar import sidecar_path
from megads.data.staging import staged
from megads.errors import ConfigError

from .conftest import MakeDataset

# Copies a block, says so and hangs, as on a filesystem that went away.
HANGING_COPY = """
import sys, time
from megads.data import staging
staging.BLOCK_BYTES = 64
def hang(self, done_bytes, note=""):
    print("copying", flush=True)
    time.sleep(600)
staging.ByteProgress.update = hang
staging.staged(sys.argv[1], sys.argv[2])
"""


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_copy_is_equal_reused_and_follows_the_data(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches a copy that differs, a second one of the same data, stale tokens read after the dataset was made anew
    with the same sizes, and a truncated copy that is trained on."""
    prefix, folder = make_dataset([5, 9, 30]).prefix, str(tmp_path / "local")
    copy = staged(prefix, folder)
    assert bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    assert idx_path(copy).read_bytes() == idx_path(prefix).read_bytes()
    inode = bin_path(copy).stat().st_ino
    assert staged(prefix, folder) == copy and bin_path(copy).stat().st_ino == inode
    os.truncate(bin_path(copy), 10)
    assert staged(prefix, folder) == copy and bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    make_dataset(documents=[[1] * 5, [2] * 9, [3] * 30])
    assert IndexedDataset(staged(prefix, folder)).document_tokens(1).tolist() == [2] * 9
    config = DataConfig(train=[DatasetConfig(prefix)], stage_to=folder, split=[1, 0])
    train, _ = open_datasets(config, 8, 0, 1000)
    assert [str(Path(runs.dataset.prefix).parent) for runs in train.runs(np.arange(1))] == [folder]


def test_a_killed_copy_leaves_no_dataset_and_no_lock(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches half a copy that passes for a whole one, and ranks that wait for ever for the one that was killed."""
    prefix, folder = make_dataset([50, 90]).prefix, tmp_path / "local"
    killed = subprocess.Popen(
        [sys.executable, "-c", HANGING_COPY, prefix, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None and killed.stdout.readline() == "copying\n"
    waiting = subprocess.Popen(
        [sys.executable, "-c", "import sys; from megads.data.staging import staged; print(staged(*sys.argv[1:]))",
         prefix, str(folder)], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(1)
    assert waiting.poll() is None, "it did not wait for the first"
    killed.send_signal(signal.SIGKILL)
    copy = waiting.communicate(timeout=60)[0].strip()
    killed.wait()
    assert bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    assert not [name for name in files_in(folder) if name.endswith(".partial")]


def test_a_folder_that_will_not_do(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches a traceback, or a disk filled to the brim, in place of a message that names key and remedy."""
    prefix = make_dataset([50]).prefix
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data.stage_to = .*file: .* cannot be copied there: .*; give a writable"):
        staged(prefix, str(tmp_path / "file"))
    with sidecar_path(prefix).open("wb") as sparse:
        sparse.truncate(shutil.disk_usage(tmp_path).free + (1 << 34))
    with pytest.raises(ConfigError, match=r"corpus takes .* GB, .* GB are free; make room"):
        staged(prefix, str(tmp_path / "full"))
    assert files_in(tmp_path / "full") == set()
