"""Ranks on two hosts that are joined by a network, whose names resolve to a loopback address on themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import REPOSITORY
from tests.launch.two_hosts import NAMES, OUTERMOST


@pytest.mark.distributed
def test_ranks_meet_where_debian_maps_the_host_name_to_127_0_1_1(tmp_path: Path) -> None:
    """Catches gloo that listens on 127.0.1.1, to which /etc/hosts of Debian and Ubuntu maps the host's own name: ranks
    of several nodes could not connect."""
    command = [*OUTERMOST, sys.executable, "-m", "tests.launch.two_hosts", str(tmp_path)]
    try:
        permitted = subprocess.run([*OUTERMOST, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"two hosts need namespaces: {error}")
    if permitted.returncode:
        pytest.skip(f"two hosts need namespaces, which are not permitted here: {permitted.stderr.strip()}")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    if isinstance(reports, dict):
        pytest.skip(f"two hosts are not possible here: {reports['not permitted']} {done.stderr.strip()}")
    assert [(report["returned"], report["failures"]) for report in reports] == [({"0": 0}, []), ({"1": 0}, [])]
    for rank in range(2):
        assert f"met {' '.join(NAMES)}" in (tmp_path / "logs" / f"rank_{rank:05d}.log").read_text()
