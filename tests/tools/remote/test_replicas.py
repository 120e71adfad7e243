"""Replicas of local checkpoints on other nodes: recovery from a lost node, and training while one does not answer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint import local_saves as local_saves_module
from megads.checkpoint.config import CheckpointConfig, list_checkpoints
from megads.checkpoint.local_files import committed, held_folders, node_folder, replica_folder
from megads.checkpoint.writer import SaveState
from megads.errors import ConfigError
from megads.runtime.distributed import open_control_plane
from megads.tools.remote import replica_transfer as transfer_module
from megads.tools.remote import replicas as replicas_module
from megads.tools.remote.replicas import partners_of
from tests.checkpoint.local_runs import Run, events_of, flip, memory_of, started
from tests.distributed import run_ranks

TWO_NODES: dict[str, Any] = {"num_nodes": 2, "replicate": True}


def wait_for_replicas(run: Run) -> None:
    """Waits until other nodes hold the last local checkpoint of all ranks; collective."""
    deadline = time.monotonic() + 30
    while not (progress := run.saves.replication()).complete:
        assert time.monotonic() < deadline, progress
        time.sleep(0.01)


def train_on(run: Run, steps: int) -> None:
    """Takes steps, and after each waits for its replicas, so that no local checkpoint is postponed."""
    if run.base is not None:
        wait_for_replicas(run)
    for _ in range(steps):
        run.step()
        run.wait()
        wait_for_replicas(run)


def on_rank_0(action: Callable[[], object]) -> None:
    """Runs the action on rank 0, between two barriers."""
    control = open_control_plane()
    control.barrier()
    if control.rank == 0:
        action()
    control.barrier()


def lose_node(run_dir: Path, node: int) -> None:
    on_rank_0(lambda: shutil.rmtree(memory_of(run_dir, node)))


def swap_nodes(run_dir: Path) -> None:
    """Exchanges the nodes' memory, as if the ranks started on the other node."""
    first, second, aside = memory_of(run_dir, 0), memory_of(run_dir, 1), run_dir / "aside"
    for source, target in ((first, aside), (second, first), (aside, second)):
        source.rename(target)


def test_partners() -> None:
    """Catches a rank whose replica is on its own node, and two ranks with the same partner."""
    assert partners_of([0, 0, 2, 2, 4, 4]) == [2, 3, 4, 5, 0, 1]
    assert partners_of([0, 1, 2]) == [1, 2, 0]
    assert partners_of([0, 0]) == [0, 1]
    for nodes, per_node in ((2, 1), (3, 4), (5, 8)):
        first = [rank - rank % per_node for rank in range(nodes * per_node)]
        partners = partners_of(first)
        assert sorted(partners) == list(range(len(first)))
        assert all(first[rank] != first[partner] for rank, partner in enumerate(partners))


def lost_nodes(run_dir: Path) -> list[tuple[int, tuple[int, ...]]]:
    found = []
    lost: tuple[Callable[[], object], ...] = (
        lambda: None, lambda: lose_node(run_dir, 1), lambda: lose_node(run_dir, 0),
        lambda: on_rank_0(lambda: swap_nodes(run_dir)), lambda: lose_node(run_dir, 1),
    )  # fmt: skip
    for start, lose in enumerate(lost, 1):
        lose()
        with started(run_dir, start, **TWO_NODES) as run:
            found.append((run.found(), run.base.from_replicas if run.base else ()))
            if start == 4:
                # Ends before its first step: the replicas are those of the previous start.
                wait_for_replicas(run)
            else:
                train_on(run, 3)
            open_control_plane().barrier()
    return found


@pytest.mark.distributed
def test_lost_nodes(tmp_path: Path) -> None:
    """Catches a restart from disk, or from another step, after a node is lost or replaced or ranks move to other nodes;
    and a start after which the run has no replicas until its first local checkpoint."""
    found = [(0, ()), (3, (2, 3)), (6, (0, 1)), (9, (0, 1, 2, 3)), (9, (2, 3))]
    assert run_ranks(lost_nodes, 4, tmp_path) == [found] * 4


def both_lost(run_dir: Path) -> tuple[int, list[str]]:
    with started(run_dir, **TWO_NODES) as run:
        train_on(run, 2)
    lose_node(run_dir, 0)
    lose_node(run_dir, 1)
    with started(run_dir, 2, **TWO_NODES) as run:
        return run.found(), run.skipped


@pytest.mark.slow
@pytest.mark.distributed
def test_all_holders_lost(tmp_path: Path) -> None:
    """Catches a start that fails, or does not report why it loads from disk, if no node holds a local checkpoint."""
    reason = "checkpoints in memory: rank 0 has none on its node, and no other node holds a copy"
    assert run_ranks(both_lost, 2, tmp_path) == [(0, [reason])] * 2


def images_of(run_dir: Path, node: int, owner: int, *, replica: bool) -> dict[int, Path]:
    """Image files in a node's memory, by step."""
    for folder, rank in held_folders(node_folder(memory_of(run_dir, node), run_dir)).items():
        if rank == owner and folder.name.startswith("replica") == replica:
            name = f"rank_{owner:05d}.safetensors"
            return {step: image / name for (_, step), (image, _) in committed(folder).items()}
    return {}


def damaged(run_dir: Path) -> list[tuple[int, tuple[int, ...], str]]:
    found = []
    for round_ in range(3):
        start, draw = 2 * round_ + 1, random.Random(round_)
        with started(run_dir, start, **TWO_NODES) as run:
            train_on(run, 2)
        step = 2 * (round_ + 1)

        def damage(round_: int = round_, step: int = step, draw: random.Random = draw) -> None:
            if round_ != 1:
                flip(images_of(run_dir, 0, 1, replica=True)[step], draw)
            if round_ != 0:
                flip(images_of(run_dir, 1, 1, replica=False)[step], draw)
            else:
                shutil.rmtree(memory_of(run_dir, 1))

        on_rank_0(damage)
        with started(run_dir, start + 1, **TWO_NODES) as run:
            assert run.base is not None
            found.append((run.found(), run.base.from_replicas, "; ".join(run.base.skipped)))
            if round_ == 0:
                # Continues from step 1.
                train_on(run, 1)
    return found


@pytest.mark.distributed
def test_damaged_copies(tmp_path: Path) -> None:
    """Catches a damaged replica that is loaded, a restart from disk although a damaged image has an intact replica, and
    an intact older replica that is not used."""
    first, second, third = run_ranks(damaged, 2, tmp_path)[0]
    assert first[:2] == (1, (1,)) and "step 2 in memory: rank 1: from rank 0's node" in first[2]
    assert second[:2] == (4, (1,)) and not second[2]
    assert third[:2] == (5, ()) and "step 6 in memory: rank 1: from rank 0's node" in third[2]


def newest_of(run: Run) -> int:
    """Step of this rank's newest local checkpoint."""
    return max(step for _, step in committed(run.saves.folder))


def steps_at_pace(run: Run, steps: int) -> list[int]:
    """Takes steps that last long enough for the transfers; returns the newest local checkpoint after each."""
    kept = []
    for _ in range(steps):
        run.step()
        run.wait()
        kept.append(newest_of(run))
        time.sleep(0.4)
        open_control_plane().barrier()
    return kept


def beside_a_stopped_partner(run_dir: Path) -> tuple[list[str], list[int]]:
    """Stops rank 1's replica process after step 1 and continues it after step 6."""
    transfer_module.HANDSHAKE_S, transfer_module.SILENCE_S = 0.3, 0.5
    control = open_control_plane()
    with started(run_dir, **TWO_NODES) as run:
        train_on(run, 1)
        assert run.saves._replicas is not None
        pid = run.saves._replicas.pid
        if control.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        control.barrier()
        kept = steps_at_pace(run, 5)
        if control.rank == 1:
            os.kill(pid, signal.SIGCONT)
        control.barrier()
        steps_at_pace(run, 3)
        wait_for_replicas(run)
        run.step()
        run.hook.on_end(run.state)
    return [line["event"] for line in events_of(run_dir)], kept


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_partner(tmp_path: Path) -> None:
    """Catches a run that fails, blocks or saves no local checkpoints because another node does not answer, that reports
    this never or at every step, and that never tries again."""
    events, kept = run_ranks(beside_a_stopped_partner, 2, tmp_path)[0]
    assert kept[-3:] == [4, 5, 6], kept
    told = [event for event in events if event in ("replica_failed", "replicas_complete_again", "replica_restarted")]
    assert 1 <= told.count("replica_failed") <= 4 and "replica_restarted" not in told
    assert told[0] == "replica_failed" and told[-1] == "replicas_complete_again"
    assert "synchronous_local_checkpoints" not in events and "local_checkpoints_off" not in events


def kill_process_for_copies(run: Run) -> None:
    """Kills rank 1's replica process; collective."""
    assert run.saves._replicas is not None
    control = open_control_plane()
    if control.rank == 1:
        os.kill(run.saves._replicas.pid, signal.SIGKILL)
    control.barrier()


def train_until(run: Run, is_reached: Callable[[], bool]) -> None:
    """Takes steps until a condition holds; collective: it must hold on all ranks at the same step."""
    deadline = time.monotonic() + 90
    while not is_reached():
        assert time.monotonic() < deadline
        steps_at_pace(run, 1)


def beside_a_dead_partner(run_dir: Path) -> tuple[int, int]:
    """Kills rank 1's replica process, then loses rank 0's node; the next start does not restart the process."""
    with started(run_dir, **TWO_NODES) as run:
        train_on(run, 1)
        kill_process_for_copies(run)
        train_until(run, lambda: any(line["event"] == "replicas_complete_again" for line in events_of(run_dir)))
        train_on(run, 2)
        copied = run.state.step
    lose_node(run_dir, 0)
    replicas_module._MOST_RESTARTS = 0
    with started(run_dir, 2, **TWO_NODES) as run:
        found = run.found()
        train_on(run, 1)
        kill_process_for_copies(run)
        steps_at_pace(run, 1)
        # A pending transfer may postpone a local checkpoint; after the failure every step saves one.
        train_until(run, lambda: any(line["event"] == "replica_failed" for line in events_of(run_dir)))
        assert steps_at_pace(run, 3) == [run.state.step - behind for behind in (2, 1, 0)]
        return copied, found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_dead_partner(tmp_path: Path) -> None:
    """Catches a replica process whose death ends replication for the rest of the run, one that is restarted without
    limit, unusable replicas after a restart, and a run that waits for replicas that will never arrive."""
    copied, found = run_ranks(beside_a_dead_partner, 2, tmp_path)[0]
    assert found == copied, "what rank 1 kept of rank 0 after its process was started again"
    told = [line for line in events_of(tmp_path) if line["event"].startswith("replica")]
    assert [line["event"] for line in told] == ["replica_restarted", "replicas_complete_again", "replica_failed"]
    reasons = [line.get("reason", "") for line in told]
    assert reasons[0].startswith("rank 1: its replica process, ")
    assert reasons[0].endswith(", killed by signal 9: started again (1 of 3)")
    assert reasons[2].endswith(", killed by signal 9, after 0 restarts: not started again")


def one_node(run_dir: Path) -> list[int]:
    with started(run_dir, replicate=True) as run:
        for _ in range(2):
            run.step()
            run.wait()
        return sorted(step for _, step in committed(run.saves.folder))


@pytest.mark.distributed
def test_one_node(tmp_path: Path) -> None:
    """Catches a run on one node that fails for lack of another, or stores replicas on the same node."""
    assert run_ranks(one_node, 2, tmp_path) == [[1, 2]] * 2
    (event,) = [event for event in events_of(tmp_path) if event["event"] == "replicas_off"]
    assert event["level"] == "warning" and "all ranks are on one node" in event["reason"]
    folders = held_folders(node_folder(memory_of(tmp_path, 0), tmp_path))
    assert sorted(folder.name for folder in folders) == ["rank_00000", "rank_00001"]


def without_memory_for_copies(run_dir: Path) -> list[int]:
    with started(run_dir, num_nodes=2) as run:
        size = run.saves.images[0].layout.size
    open_control_plane().barrier()
    # This rank's two images are already allocated.
    local_saves_module.available_memory = lambda: size  # type: ignore[assignment]
    with started(run_dir, 2, **TWO_NODES) as run:
        run.step()
        run.wait()
        return sorted(step for _, step in committed(run.saves.folder))


@pytest.mark.distributed
def test_no_memory_for_copies(tmp_path: Path) -> None:
    """Catches a node without memory for another node's replicas that runs out of memory, or that saves no local
    checkpoints of its own either."""
    assert run_ranks(without_memory_for_copies, 2, tmp_path) == [[1]] * 2
    (event,) = [event for event in events_of(tmp_path) if event["event"] == "replicas_off"]
    assert "replicas of another rank need" in event["reason"]
    assert not replica_folder(node_folder(memory_of(tmp_path, 0), tmp_path), 1).exists()


def slow_network(run_dir: Path) -> tuple[list[list[int]], list[int]]:
    """Delays each transfer to rank 1's node by a second, about five steps; saves a checkpoint on disk after step 6."""
    control, kept = open_control_plane(), []
    send_file = transfer_module.ReplicaConnection.send_file

    def slow(*arguments: Any) -> None:
        time.sleep(1.0 if control.rank == 0 else 0.0)
        send_file(*arguments)

    transfer_module.ReplicaConnection.send_file = slow  # type: ignore[method-assign]
    with started(run_dir, behind=True, every_steps=6, keep=0, **TWO_NODES) as run:
        transfer_module.ReplicaConnection.send_file = send_file  # type: ignore[method-assign]
        train_on(run, 1)
        for step in range(2, 9):
            run.step()
            run.wait()
            if step == 6:
                while run.writer is not None and run.writer.progress().state is SaveState.writing:
                    time.sleep(0.01)
            kept.append(sorted(step for _, step in committed(run.saves.folder)))
            control.barrier()
        wait_for_replicas(run)
        run.step()
        run.wait()
    lose_node(run_dir, 0)
    with started(run_dir, 2, **TWO_NODES) as run:
        return kept, [run.found(), *list_checkpoints(run_dir)]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_slow_network(tmp_path: Path) -> None:
    """Catches a step that waits for the network, and a replicated local checkpoint that is overwritten before a later
    one is replicated."""
    kept, (found, *on_disk) = run_ranks(slow_network, 2, tmp_path)[0]
    # Step 2 would be sent until after step 8, but the checkpoint on disk overwrites its image.
    assert kept == [[1, 2]] * 4 + [[1, 6]] * 3
    assert found == 6 and on_disk == [6]
    late = [event for event in events_of(tmp_path) if event["event"] == "local_checkpoint_put_off"]
    assert len(late) == 1 and "being sent to another node" in late[0]["reason"]


def test_without_local_checkpoints() -> None:
    """Catches replicate=true without local checkpoints: the missing replicas would show only at a node loss."""
    with pytest.raises(ConfigError, match=r"set checkpoint\.local_every_steps"):
        CheckpointConfig(replicate=True).check()
    CheckpointConfig(replicate=True, local_every_steps=5).check()
