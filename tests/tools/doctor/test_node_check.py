"""The health check of nodes: verdicts as pure functions, and the check with real checkers, some of them faulty."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.errors import ConfigError
from megads.runtime.config import ClusterKind
from megads.tools.doctor import node_checker
from megads.tools.doctor.node_check import (
    CHECKER,
    CheckNodesConfig,
    CheckResult,
    CheckTarget,
    NodeMeasurements,
    check_nodes,
    find_faulty_nodes,
    first_round,
    node_problems,
    second_round,
)

GOOD = NodeMeasurements(["cpu"], [0.1], [], 8e9, 1e11, 2e8, 2e9, 1e9, 0.001, 0.002, {})


def problems_of(**changes: Any) -> list[str]:
    """Problems of one node of five; the others are healthy."""
    nodes = dict.fromkeys("abcd", GOOD) | {"e": dataclasses.replace(GOOD, **changes)}
    found = node_problems(nodes, CheckNodesConfig(min_tflops=0.01))
    assert all(not found[name] for name in "abcd")
    return found["e"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": ["cuda:0", "cuda:1"], "tflops": [0.1, 0.04]}, "matrix multiplication at 0.04 TFLOP/s, the median"),
        ({"tflops": [0.009]}, "0.009 TFLOP/s, min_tflops is 0.01"),
        ({"wrong_products": ["cuda:3"]}, "cuda:3 computes wrong matrix multiplications"),
        ({"memory_bytes": 1e8}, "0.09 GiB of memory available"),
        ({"disk_free_bytes": 1e8}, "0.09 GiB of disk free"),
        ({"write_bytes_per_s": 5e5}, "writes 0.5 MB/s"),
        ({"read_bytes_per_s": 1e7}, "reads from it at 10 MB/s, the median of the nodes is 2000 MB/s"),
        ({"clock_offset_s": -60.0, "clock_uncertainty_s": 1.0}, "its clock is off by -60.0 s"),
        ({"errors": {"loopback": "OSError: no route"}}, "loopback: OSError: no route"),
    ],
)
def test_each_defect_is_named(changes: dict[str, Any], said: str) -> None:
    """Catches a measurement that is made but ignored, and a second GPU that is ignored."""
    assert any(said in problem for problem in problems_of(**changes))


def test_a_healthy_node_is_not_rejected() -> None:
    """Catches false alarms: noise within the bounds, and a slow answer mistaken for a wrong clock."""
    changes = {"tflops": [0.06], "read_bytes_per_s": 4e8, "clock_offset_s": 20.0, "clock_uncertainty_s": 19.0}
    assert problems_of(**changes) == []
    assert node_problems({}, CheckNodesConfig()) == {}


def test_measurements_survive_their_journey() -> None:
    """Catches a field that a JSON round trip changes."""
    assert NodeMeasurements(**json.loads(json.dumps(dataclasses.asdict(GOOD)))) == GOOD


@pytest.mark.fault(23)
@pytest.mark.parametrize("count", range(3, 10))
def test_one_faulty_node_is_named_alone(count: int) -> None:
    """Catches a healthy neighbor that is blamed too, a node that is never paired because their number is odd, and a
    node in two pairs of one round."""
    nodes = [f"n{number}" for number in range(count)]
    for faulty in nodes:
        first = first_round(nodes)
        failed = [pair for pair in first if faulty in pair]
        rounds = second_round(nodes, failed)
        for pairs in [first, *rounds]:
            assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        assert {node for pair in itertools.chain(first, *rounds) for node in pair} == set(nodes)
        assert not any({a, b} == {c, d} for pairs in rounds for a, b in pairs for c, d in failed), "the same pair again"
        again = [pair for pairs in rounds for pair in pairs if faulty in pair]
        assert list(find_faulty_nodes(nodes, failed, again)) == [faulty]


def test_nobody_is_acquitted_without_a_good_pair() -> None:
    """Catches a failed pair whose nodes both stay in service, or of which one is rejected at random."""
    assert set(find_faulty_nodes(["a", "b"], [("a", "b")], [])) == {"a", "b"}
    assert find_faulty_nodes(["a", "b"], [], []) == {}
    assert find_faulty_nodes(["a"], [], []) == {}


def test_more_doubtful_than_good_nodes_take_turns() -> None:
    """Catches suspect nodes that are dropped because there are not enough healthy ones for all at once."""
    nodes = list("abcdef")
    rounds = second_round(nodes, [("a", "b"), ("c", "d")])
    assert rounds == [[("a", "e"), ("b", "f")], [("c", "e"), ("d", "f")]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"checkers": 0},
        {"checkers": 2, "cluster": ClusterKind.slurm},
        {"min_of_median": 1.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """Catches accepted settings by which the check rejects every node or does not wait."""
    with pytest.raises(ConfigError):
        CheckNodesConfig(**wrong).check()


# On a shared machine, speeds are meaningless.
SETTINGS = {"seconds": 0.05, "min_of_median": 0.0, "min_disk_of_median": 0.0, "min_disk_mb_per_s": 0.0}


def check(folder: Path, count: int, fault: str = "", timeout_s: float = 60.0) -> CheckResult:
    """Runs the check with `count` checkers; a `fault` applies to the third."""
    command = ("-m", "tests.node_faults", fault) if fault else CHECKER
    config = CheckNodesConfig(folder=str(folder), timeout_s=timeout_s, **SETTINGS)
    return check_nodes(config, CheckTarget(tuple(f"node/{number}" for number in range(count)), command=command))


@pytest.mark.fault(23)
@pytest.mark.distributed
def test_a_node_that_sends_wrong_data_is_named(tmp_path: Path) -> None:
    """Catches received data that is not compared, and blame for the healthy neighbor."""
    checked = check(tmp_path, 4, "send_wrong_data")
    assert list(checked.rejected) == ["node/2"]
    assert "exchanging data fails with node/3 and with node/0" in checked.rejected["node/2"]
    assert "1 of 1048576 elements of the other are wrong" in checked.pairs["node/2", "node/3"]
    assert not list(tmp_path.iterdir()), "the check leaves nothing behind"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_node_that_hangs_is_named(tmp_path: Path) -> None:
    """Catches a check that hangs on a stopped node, and a verdict on the others that is lost with it."""
    checked = check(tmp_path, 3, "stop", timeout_s=40)
    assert checked.rejected == {"node/2": "no answer within 40 s"}
    assert checked.pairs == {("node/0", "node/1"): ""}


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GEMM check that one flipped bit passes."""
    inner = torch.mm

    def flipped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        inner(a, b, out=out).view(torch.int32)[17, 23] ^= 1 << 20
        return out

    assert node_checker.matmul_speed(torch.device("cpu"), 0.01)[1] == 1.0
    monkeypatch.setattr(torch, "mm", flipped)
    assert node_checker.matmul_speed(torch.device("cpu"), 0.01)[1] == 0.0


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    """Catches a check that crashes instead of reporting a problem."""
    (tmp_path / "file").touch()
    found = node_checker.measure(tmp_path / "file" / "runs", 0.01, (0.0, 0.0))
    assert "disk" in found.errors and found.loopback_bytes_per_s > 0 and found.wrong_products == []


def test_a_disk_is_measured_however_little_time_there_is(tmp_path: Path) -> None:
    """Catches a measured speed of zero, and a file that the measurement leaves behind."""
    free, written, read = node_checker.disk_speed(tmp_path / "new", 0.0)
    assert free > 0 and written > 0 and read > 0 and not list((tmp_path / "new").iterdir())
    assert node_checker.loopback_speed(0.0) > 0
