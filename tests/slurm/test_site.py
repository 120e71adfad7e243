"""`megads report site=...` with a real SLURM without accounting: slurmdbd and a database are missing here."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.report.sacct import read_site


def test_sacct_says_why_it_has_no_jobs(slurm_cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that the real sacct does not accept, and a message of sacct that the report hides."""
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="accounting storage is disabled"):
        read_site("sacct --starttime=now-1hour")
