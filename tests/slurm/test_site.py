"""`megads report site=...` beside a real SLURM, which accounts for no job: slurmdbd and a database are missing here."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.report.sacct import read_site


def test_sacct_says_why_it_has_no_jobs(slurm_cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that the real sacct does not take, and its own message that the report swallows."""
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="accounting storage is disabled"):
        read_site("sacct --starttime=now-1hour")
