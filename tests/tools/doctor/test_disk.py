"""Space and speed of real disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.tools.doctor.disk import check_disk, file_system
from megads.tools.doctor.finding import Status


def test_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    """Catches a doctor that makes the folder, or leaves its file behind."""
    (finding,) = check_disk("runs", tmp_path / "runs" / "a", needed=True)
    assert "free, writes" in finding.found and "fsync" in finding.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("needed", "status"), [(True, Status.problem), (False, Status.note)])
def test_a_place_where_nothing_can_be_written(needed: bool, status: Status) -> None:
    """Catches a run that starts and fails at its first file; not even root can write to /proc."""
    (finding,) = check_disk("runs", Path("/proc/megads-runs"), needed)
    assert finding.status == status and "cannot be written" in finding.found


def test_memory_is_no_disk() -> None:
    """Catches runs whose checkpoints are gone after a restart."""
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    (finding,) = check_disk("runs", Path("/dev/shm"), needed=True)
    assert finding.status != Status.ok


def test_file_system_takes_the_innermost_mount(tmp_path: Path) -> None:
    """Catches /data taken for the mount point of /database, and a mount point with a space in it."""
    mounts = tmp_path / "mounts"
    mounts.write_text("x / ext4 rw 0 0\nx /data nfs4 rw 0 0\nx /data/my\\040runs lustre rw 0 0\n")
    for folder, kind in (("/database", "ext4"), ("/data/a", "nfs4"), ("/data/my runs/b", "lustre")):
        assert file_system(Path(folder), mounts) == kind
    assert file_system(tmp_path, tmp_path / "none") == "unknown"
