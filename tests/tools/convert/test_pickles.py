"""Files of torch.save that are not what they seem."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from megads.errors import CheckpointError
from megads.tools.convert.pickles import load_inert, load_tensors


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    """Catches a file of megabytes that fills the memory with gigabytes of zeros; and a checkpoint that is refused."""
    good, bomb = tmp_path / "good.bin", tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(1_000_000)}, good)
    assert load_tensors(good)["weight"].numel() == 1_000_000
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    assert bomb.stat().st_size < 100_000
    for given in (bomb, bomb.open("rb")):
        with pytest.raises(CheckpointError, match=r"would unpack to 4\.0 MB, which torch\.save never writes"):
            load_inert(given)
