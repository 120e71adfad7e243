"""The check itself, with real checkers on this machine; some go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megads.launch.node_check import measure
from megads.launch.node_check.check import CHECKER, Checked, CheckTarget, check_nodes
from megads.launch.node_check.config import CheckNodesConfig

# On a machine that others use too, speeds say nothing.
SETTINGS = {"seconds": 0.05, "min_of_median": 0.0, "min_disk_of_median": 0.0, "min_disk_mb_per_s": 0.0}


def check(folder: Path, count: int, fault: str = "", timeout_s: float = 60.0) -> Checked:
    """Checks with so many checkers, the third of which goes wrong."""
    command = (*CHECKER, "--entry", f"tests.node_faults:{fault}") if fault else CHECKER
    config = CheckNodesConfig(folder=str(folder), timeout_s=timeout_s, **SETTINGS)
    return check_nodes(config, CheckTarget(tuple(f"node/{number}" for number in range(count)), command=command))


@pytest.mark.distributed
def test_a_node_that_sends_wrong_data_is_named(tmp_path: Path) -> None:
    """faults.md row 23. Catches data that nobody compares, and blame for the healthy neighbour."""
    checked = check(tmp_path, 4, "send_wrong_data")
    assert list(checked.rejected) == ["node/2"]
    assert "exchanging data fails with node/3 and with node/0" in checked.rejected["node/2"]
    assert "1 of 1048576 elements of the other are wrong" in checked.pairs["node/2", "node/3"]
    assert not list(tmp_path.iterdir()), "the check leaves nothing behind"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_node_that_hangs_is_named(tmp_path: Path) -> None:
    """Catches a check that waits for ever for a stopped node, and a verdict on the others that is lost with it."""
    checked = check(tmp_path, 3, "stop", timeout_s=40)
    assert checked.rejected == {"node/2": "no answer within 40 s"}
    assert checked.pairs == {("node/0", "node/1"): ""}


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check of products that one flipped bit passes."""
    inner = torch.mm

    def flipped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        inner(a, b, out=out).view(torch.int32)[17, 23] ^= 1 << 20
        return out

    assert measure.products(torch.device("cpu"), 0.01)[1] == 1.0
    monkeypatch.setattr(torch, "mm", flipped)
    assert measure.products(torch.device("cpu"), 0.01)[1] == 0.0


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    """Catches a check that dies where it should report."""
    (tmp_path / "file").touch()
    found = measure.measure(tmp_path / "file" / "runs", 0.01, (0.0, 0.0))
    assert "disk" in found.errors and found.loopback_bytes_per_s > 0 and found.wrong_products == ()
