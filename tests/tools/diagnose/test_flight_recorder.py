"""Tests which rank the flight recorder analysis blames, on synthetic traces and on those that torch really writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megads.tools.diagnose.flight_recorder import FlightTrace, Operation, find_culprit_ranks, parse_trace
from megads.tools.diagnose.inputs import read_flight_dumps


def entry(record: int, group: str, sequence: int, name: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    return {
        "record_id": record,
        "pg_id": int(group),
        "process_group": (group, f"GROUP_{group}"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "is_p2p": False,
        "frames": [{"filename": "train.py", "line": sequence, "name": "step"}],
        **changes,
    }


def trace(
    rank: int, entries: Sequence[dict[str, Any]], groups: dict[str, list[int]], last: dict[str, int] | None = None
) -> FlightTrace:
    config = {name: {"name": name, "desc": f"GROUP_{name}", "ranks": str(ranks)} for name, ranks in groups.items()}
    status = {
        name: {"last_enqueued_collective": number, "last_started_collective": -1, "last_completed_collective": number}
        for name, number in (last or {}).items()
    }
    return parse_trace(rank, {"version": "2.10", "pg_config": config, "pg_status": status, "entries": list(entries)})


ALL = {"0": [0, 1, 2, 3]}


def test_a_rank_that_did_not_enter_is_blamed() -> None:
    """Catches a waiting rank reported as the one that is waited for."""
    traces = [trace(rank, [entry(1, "0", 5), entry(2, "0", 6)], ALL) for rank in (0, 1, 3)]
    late = trace(2, [entry(1, "0", 5)], ALL)
    found = find_culprit_ranks([*traces, late])
    assert (found.missing, found.waiting, found.culprits) == ((2,), (0, 1, 3), (2,))
    assert found.operation is not None and found.operation.sequence == 6
    assert found.stacks == {2: ("train.py:5 step",)}
    assert "rank 2 did not enter nccl:all_reduce number 6 of group GROUP_0" in found.sentences()[0]


def test_the_end_of_a_chain_is_to_blame() -> None:
    """Catches a rank reported as the root cause that itself waits for another one."""
    groups = {"0": [0, 1], "1": [1, 2]}
    waits_for_1 = trace(0, [entry(1, "0", 1)], groups)
    waits_for_2 = trace(1, [entry(1, "1", 1)], groups)
    idle = trace(2, [], groups)
    assert find_culprit_ranks([waits_for_1, waits_for_2, idle]).missing == (2,)


def test_ranks_in_a_deadlock_are_reported() -> None:
    """Catches a deadlock of two collectives in opposite order for which no rank is reported."""
    groups = {"0": [0, 1], "1": [0, 1]}
    found = find_culprit_ranks([trace(0, [entry(1, "0", 1)], groups), trace(1, [entry(1, "1", 1)], groups)])
    assert found.missing == (0, 1)


@pytest.mark.parametrize(
    "change",
    [{"name": "nccl:broadcast"}, {"input_sizes": [[9]]}, {"input_dtypes": ["Half"]}],
    ids=["name", "size", "type"],
)
def test_a_rank_in_another_collective_is_reported(change: dict[str, Any]) -> None:
    """Catches a rank that is not reported although it called another collective, or with another tensor."""
    traces = [trace(rank, [entry(1, "0", 1)], ALL) for rank in (0, 1, 2)]
    found = find_culprit_ranks([*traces, trace(3, [entry(1, "0", 1, **change)], ALL)])
    assert (found.mismatched, found.culprits, found.missing) == ((3,), (3,), ())
    assert "rank 3 entered another collective than the others" in found.sentences()[0]


def test_an_uneven_all_to_all_is_no_mismatch() -> None:
    """Catches an uneven all-to-all reported as a mismatch."""
    traces = [trace(rank, [entry(1, "0", 1, "nccl:all_to_all", input_sizes=[[rank]])], ALL) for rank in range(4)]
    assert find_culprit_ranks(traces).culprits == ()


def test_a_device_that_fell_behind_is_reported() -> None:
    """Catches a rank that is not reported although its device did not complete what its peers' did."""
    ahead = [trace(rank, [entry(9, "0", 9)], ALL, {"0": 9}) for rank in (0, 1, 2)]
    behind = trace(3, [entry(7, "0", 7), entry(8, "0", 8), entry(9, "0", 9)], ALL, {"0": 9})
    found = find_culprit_ranks([*ahead, behind])
    assert (found.missing, found.stalled, found.culprits) == ((), (3,), (3,))


def test_gloos_dumps_are_understood() -> None:
    """Catches a gloo rank that entered nothing and is overlooked, and one with a longer trace reported as stalled."""
    group = {"process_group": ("0", "default_pg")}
    only = trace(0, [entry(1, "0", 1, "gloo:all_reduce", **group)], {})
    assert find_culprit_ranks([only, *(trace(rank, [], {}) for rank in (1, 2, 3))]).missing == (1, 2, 3)
    ahead = [trace(rank, [entry(9, "0", 9, "gloo:all_reduce", **group)], {}) for rank in (0, 1)]
    longer = trace(2, [entry(place, "0", place, "gloo:all_reduce", **group) for place in (7, 8, 9)], {})
    assert find_culprit_ranks([*ahead, longer]).culprits == ()


def test_a_rank_without_a_dump_is_reported() -> None:
    """Catches a dead rank that is not reported because it left no dump."""
    found = find_culprit_ranks([trace(rank, [entry(1, "0", 1)], ALL) for rank in (0, 1, 3)])
    assert (found.silent, found.culprits) == ((2,), (2,))
    assert "rank 2 left no dump" in found.sentences()


def test_completed_collectives_block_nobody() -> None:
    """Catches a completed collective reported as one that ranks wait for."""
    done = [entry(1, "0", 1, state="completed")]
    found = find_culprit_ranks(
        [trace(rank, done if rank else [], ALL, {"0": 1} if rank else None) for rank in range(4)]
    )
    assert found.culprits == () and found.sentences() == ["no rank is behind the others"]


def test_a_stage_that_did_not_send_is_reported() -> None:
    """Catches a stage that is not reported although it never sent what the next one waits for."""
    groups = {"0": [4, 5]}
    waits = trace(4, [entry(1, "0", 0, "nccl:recv 0<-1", is_p2p=True)], groups)
    found = find_culprit_ranks([waits, trace(5, [], groups)])
    assert found.missing == (5,)
    sends = trace(5, [entry(1, "0", 0, "nccl:send 1->0", is_p2p=True)], groups)
    assert find_culprit_ranks([waits, sends]).missing == ()


@pytest.mark.parametrize("dump", [{}, {"entries": 3}, {"entries": [{}]}, {"entries": [{"process_group": 1}]}])
def test_a_file_that_is_no_dump_is_refused(dump: dict[str, Any]) -> None:
    """Catches a traceback for a file that is not a dump."""
    with pytest.raises(ValueError):
        parse_trace(0, dump)


_RANK = """
import datetime, os, sys, time, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
dist.all_reduce(torch.ones(4))
def step():
    return dist.all_reduce(torch.ones(8), async_op=True)
if rank == 2:
    time.sleep(1)
else:
    step()
    time.sleep(1)
dump = c10d._dump_fr_trace() if sys.argv[2] == "pickle" else c10d._dump_fr_trace_json()
open(f"{sys.argv[1]}/trace_rank_{rank}", "wb").write(dump)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_real_dumps_of_gloo_are_read(kind: str, tmp_path: Path) -> None:
    """Catches a format that torch has changed, and gloo's dumps, which list no ranks and mark nothing as completed."""
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    folder = tmp_path / "dumps"
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script), str(folder), kind]
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, *command], env=environment, timeout=120, check=True, capture_output=True)
    found = find_culprit_ranks(read_flight_dumps([str(folder)]))
    assert found.missing == (2,) and found.waiting == (0, 1, 3)
    assert found.operation is not None and found.operation.name == "gloo:all_reduce"
    if kind == "pickle":
        assert any("rank.py" in frame for frame in found.stacks[2])


@pytest.mark.parametrize(("description", "named"), [("tp", "tp"), ("undefined", "7"), ("", "7")])
def test_operations_are_titled_by_their_groups_description(description: str, named: str) -> None:
    """Catches a group named by a number although it has a description, or by a description that says nothing."""
    found = Operation("7", "".join(description), 3, "nccl:all_reduce", (), (), False, False, (), 0)
    assert found.title == f"nccl:all_reduce number 3 of group {named}"
