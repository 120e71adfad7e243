"""Placement of ranks in SLURM jobs, refused layouts, and hangs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.launch import agent_ranks, node_agent, slurm_ranks
from megads.launch.hang_detection import HangSettings
from megads.launch.node_agent import MessageKind
from megads.launch.node_ranks import NodePart
from megads.launch.rank_outcome import NodeReport
from megads.launch.slurm_ranks import assign_ranks_to_nodes, find_slurm_placement
from megads.parallel.config import ParallelConfig
from megads.runtime import environment, slurm
from megads.runtime.config import ClusterConfig, ClusterKind, RunConfig
from megads.runtime.heartbeat import ENGINE_STEP, RankPosition
from megads.runtime.slurm import Allocation, Node, SlurmJob


def job(nodes: int, gpus: int = 0) -> Allocation:
    return Allocation(SlurmJob("7", 0, "c"), tuple(Node(f"n{n}", f"10.0.0.{n}") for n in range(nodes)), gpus)


def config(
    ranks_per_node: int | None = None, dry_run: bool = False, nodes: int | None = None, **sizes: int
) -> RootConfig:
    cluster = ClusterConfig(kind=ClusterKind.slurm, ranks_per_node=ranks_per_node, nodes=nodes)
    return RootConfig(parallel=ParallelConfig(**sizes), cluster=cluster, run=RunConfig(dry_run=dry_run))


@pytest.mark.parametrize(
    ("allocation", "settings", "per_node"),
    [
        (job(2, gpus=8), {"tp": 8, "pp": 2}, 8),
        (job(48, gpus=8), {"tp": 4, "pp": 12, "dp": 8}, 8),
        (job(2), {"tp": 2, "pp": 2}, 2),
        (job(3), {"dp": 3}, 1),
        (job(2, gpus=8), {"tp": 4, "ranks_per_node": 2}, 2),
    ],
)
def test_ranks_fill_the_nodes(allocation: Allocation, settings: dict, per_node: int) -> None:
    """Catches GPUs without a rank, and ranks placed on other nodes than requested."""
    placement = assign_ranks_to_nodes(config(**settings), allocation)
    assert (placement.nodes, placement.ranks_per_node) == (allocation.nodes, per_node)


@pytest.mark.parametrize(
    ("allocation", "settings", "message"),
    [
        (job(2, gpus=8), {"tp": 8}, "2 nodes of SLURM job 7 take 8 each (GPUs of each), 16 together: ask for them with "
         "sbatch --nodes=1, change parallel.dp, or set cluster.ranks_per_node to leave GPUs idle"),
        (job(3), {"tp": 4}, "tp 4 x cp 1 x pp 1 x dp 1 = 4 ranks cannot be distributed evenly over the 3 nodes of "
         "SLURM job 7: ask for another number of nodes (sbatch --nodes=2), or change parallel.dp"),
        (job(2, gpus=4), {"tp": 8, "pp": 2, "ranks_per_node": 8}, "the job has 4 GPUs on each node"),
        (job(1, gpus=4), {"tp": 6}, "take 4 each (GPUs of each), 4 together: change parallel.dp"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused(allocation: Allocation, settings: dict, message: str) -> None:
    """Catches a job that starts with a layout that leaves GPUs idle or lacks one for a rank."""
    with pytest.raises(ConfigError) as refused:
        assign_ranks_to_nodes(config(**settings), allocation)
    assert message in str(refused.value)


def test_outside_a_job_only_a_dry_run_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a training on a login node, and a dry run there that ignores cluster.nodes."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"this is no SLURM job .* sbatch scripts/slurm/train.sbatch"):
        find_slurm_placement(config(tp=2))
    assert find_slurm_placement(config(tp=2, dry_run=True)) is None
    found = find_slurm_placement(config(tp=2, dry_run=True, nodes=2))
    assert found is not None and found.ranks_per_node == 1
    with pytest.raises(ConfigError, match=r"= 2 ranks cannot be distributed evenly over 3 nodes"):
        find_slurm_placement(config(tp=2, dry_run=True, nodes=3))


def test_slurm_keys_are_refused_without_slurm() -> None:
    """Catches a container or a job chain that a run without SLURM silently ignores."""
    for changes in ({"wrapper": ["apptainer"]}, {"srun_options": ["--x"]}, {"chain": True}):
        with pytest.raises(ConfigError, match="needs cluster=slurm"):
            dataclasses.replace(ClusterConfig(), **changes).check()


def with_spares(spare_nodes: int, **sizes: int) -> RootConfig:
    return dataclasses.replace(config(**sizes), cluster=ClusterConfig(kind=ClusterKind.slurm, spare_nodes=spare_nodes))


def test_spare_nodes_get_no_ranks() -> None:
    """Catches ranks on a spare node, and a layout that is refused because the job has one."""
    placement = assign_ranks_to_nodes(with_spares(1, tp=8, pp=2), job(3, gpus=8))
    assert [node.name for node in placement.nodes] == ["n0", "n1"] and placement.ranks_per_node == 8
    moved = placement.on(["n0", "n2"])
    assert [node.name for node in moved.nodes] == ["n0", "n2"] and "not used: n1" in str(moved)


def test_missing_spare_nodes_are_refused() -> None:
    """Catches a job without its spare nodes, and advice that omits them."""
    with pytest.raises(ConfigError, match=r"cluster\.spare_nodes = 2, but SLURM job 7 has 2 nodes"):
        assign_ranks_to_nodes(with_spares(2, tp=2), job(2))
    with pytest.raises(ConfigError, match=r"sbatch --nodes=3"):
        assign_ranks_to_nodes(with_spares(1, tp=8, pp=2), job(2, gpus=8))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"spare_nodes": 1}, "cluster.spare_nodes = 1: needs cluster=slurm"),
        ({"kind": ClusterKind.slurm, "spare_nodes": 1, "max_restarts": 0}, "no spare could ever take a place"),
        ({"max_restarts": -1}, "cluster.max_restarts = -1: must not be negative"),
    ],
)
def test_spare_nodes_that_cannot_be_used_are_refused(wrong: dict, message: str) -> None:
    """Catches spare nodes that can never be used."""
    with pytest.raises(ConfigError) as refused:
        ClusterConfig(**wrong).check()
    assert message in str(refused.value)


class RanksThatStay:
    """Ranks of node 3 that outlive every SIGKILL; one fails at the third poll."""

    part = SimpleNamespace(node=3)

    def __init__(self) -> None:
        self.polls, self.kills = 0, 0

    def hang(self) -> list[RankPosition]:
        return []

    def poll(self) -> bool:
        self.polls += 1
        return self.polls < 100

    @property
    def failing(self) -> bool:
        return self.polls >= 3

    def silences(self) -> list[Any]:
        return []

    def kill(self) -> None:
        self.kills += 1


def watch(monkeypatch: pytest.MonkeyPatch, ordered: int, signals: list[int]) -> tuple[RanksThatStay, list[str]]:
    """Runs `_watch` with a clock of one second a reading and the end ordered at a poll. Also returns what was sent."""
    ranks, clock, said = RanksThatStay(), itertools.count(1000.0), list[str]()
    control = SimpleNamespace(send=lambda message: said.append(message["kind"]))
    monkeypatch.setattr(node_agent, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(node_agent, "_END_WITHIN_S", 6.5)
    node_agent._watch(ranks, control, signals, lambda: ranks.polls >= ordered)  # type: ignore[arg-type]
    return ranks, said


def test_an_agent_waits_a_bounded_time_for_its_ranks_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an agent that leaves ranks behind right after it has killed them, one that hangs on a process in an
    uninterruptible call, and messages that are sent at every poll."""
    signals = [10, 12]
    ranks, said = watch(monkeypatch, 5, signals)
    assert ranks.kills == ranks.polls - 4 == 7, "the clock is asked twice at the first look of them"
    assert said == [MessageKind.signalled, MessageKind.failing] and signals == []
    ranks, said = watch(monkeypatch, 1000, [])
    assert (ranks.polls, ranks.kills, said) == (100, 0, [MessageKind.failing])


def test_a_hang_is_called_only_when_no_node_has_a_reason_to_wait() -> None:
    """Catches ranks killed while they wait for a node whose rank is saving, blame on a rank that waits for one of
    another node, and nodes that make progress again but still count."""
    nodes = (Node("a", "a"), Node("b", "b"))
    ranks = slurm_ranks.SlurmRanks(
        NodePart(Path("run"), ("-m", "module"), 1, 1, num_nodes=2), Allocation(SlurmJob("7", 0, ""), nodes), nodes
    )
    waits = RankPosition(0, 6, ENGINE_STEP, 30.0, node="a")
    stuck = RankPosition(1, 5, "SlowHook", 30.0, node="b")

    def hear(number: int, *positions: RankPosition) -> None:
        told = [dataclasses.asdict(position) for position in positions]
        ranks._take(json.loads(json.dumps({"kind": "hang", "number": number, "positions": told})))

    hear(0, waits)
    assert ranks.hang() == []
    hear(1, stuck)
    assert ranks.hang() == [stuck]
    hear(0)
    assert ranks.hang() == []


def of_nodes(count: int) -> slurm_ranks.SlurmRanks:
    nodes = tuple(Node(f"n{number}", f"10.0.0.{number}") for number in range(count))
    part = NodePart(Path("run"), ("-m", "module"), 1, 1, num_nodes=count)
    return slurm_ranks.SlurmRanks(part, Allocation(SlurmJob("7", 0, ""), nodes), nodes)


def test_a_silent_node_is_lost_when_all_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a node without power that hangs a run, a run that is ended because an agent is silent while its ranks
    train, nodes reported as lost when the launcher itself received nothing or was stopped, one that has not yet sent
    its first heartbeat, and one whose ranks have ended."""
    now = itertools.count()
    monkeypatch.setattr(agent_ranks, "time", SimpleNamespace(monotonic=lambda: 1000.0 + 0.5 * next(now)))
    ranks = of_nodes(4)

    def hear(*numbers: int, looks: int = 1, **content: object) -> None:
        for _ in range(looks):
            for number in numbers:
                ranks._take({"kind": "alive", "number": number, **content})
            ranks._listened()

    hear(0, 1, 2, looks=2)
    assert ranks.silent_nodes() == {}
    hear(0, 1, looks=2 * int(agent_ranks.NODE_SILENT_S) - 2)
    assert ranks.silent_nodes() == {}
    hear(0, 1, looks=2)
    assert list(ranks.silent_nodes()) == ["n2"] and ranks.lost_nodes() == {}, "n3 has not begun"
    waits = [dataclasses.asdict(RankPosition(0, 6, ENGINE_STEP, 30.0))]
    for number in (0, 1):
        hear(number, kind="hang", positions=waits)
    assert ranks.lost_nodes() == {}, "n3 does not wait"
    hear(3, kind="hang", positions=waits)
    assert list(ranks.lost_nodes()) == ["n2"] and ranks.hang() == []
    assert not ranks._only_silent_left()
    for number in (0, 1, 3):
        ranks._take({"kind": "report", "number": number, "report": NodeReport(f"n{number}").encode()})
    assert ranks._only_silent_left()
    hear(looks=2 * int(agent_ranks.NODE_SILENT_S))
    assert list(ranks.silent_nodes()) == ["n2"], "the others have ended"
    hear(2)
    assert ranks.silent_nodes() == {} and not ranks._only_silent_left()

    ranks, gap = of_nodes(2), itertools.cycle([0, 3600])
    hear(0, 1)
    monkeypatch.setattr(agent_ranks, "time", SimpleNamespace(monotonic=lambda: 5000.0 + next(gap)))
    hear()
    hear()
    assert ranks.silent_nodes() == {}, "it was the launcher that was stopped for an hour"
    monkeypatch.setattr(agent_ranks, "time", SimpleNamespace(monotonic=lambda: 9e4 + 0.5 * next(now)))
    hear(looks=100)
    assert len(ranks.silent_nodes()) == 2 and ranks.lost_nodes() == {}, "nobody is heard"


def test_a_poll_ends_a_job_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a launcher that waits for ever after srun ended or a rank failed, one that takes srun's own SIGTERM for a
    stop request, and ranks that are killed before the others could save their state."""
    ranks, sent, ordered, now = of_nodes(2), list[int](), list[float](), [1000.0]
    srun = subprocess.Popen(["sleep", "600"])
    ranks._srun, ranks._cancelled = srun, True  # there is no step that scancel could end
    words: list[dict[str, Any]] = []
    control = SimpleNamespace(hear=lambda: [words.pop() for _ in range(len(words))])
    control.order_end = lambda: ordered.append(now[0])
    ranks._control = control  # type: ignore[assignment]
    monkeypatch.setattr(slurm_ranks, "POLL_S", 0.0)
    for module in (agent_ranks, slurm_ranks):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stand_in = SimpleNamespace(getpid=os.getpid, kill=lambda pid, signal: sent.append(signal))
    monkeypatch.setattr(agent_ranks, "os", stand_in)

    def poll(after_s: float = 0.0, *heard: dict[str, Any]) -> bool:
        now[0] += after_s
        words.extend(heard)
        return ranks.poll()

    try:
        assert poll(0.0, {"kind": MessageKind.signalled}) and sent == []
        assert poll(agent_ranks._SIGNAL_SETTLES_S) and sent == []
        assert poll(0.1) and sent == [signal.SIGTERM] and poll(9.0) and len(sent) == 1, "forwarded once"
        assert poll(0.0, {"kind": MessageKind.failing, "number": 1}, {"kind": MessageKind.signalled})
        assert poll(agent_ranks._SIGNAL_SETTLES_S + 0.1) and len(sent) == 1, "srun's own signal, of a step that failed"
        assert poll(agent_ranks.KILL_AFTER_S - agent_ranks._SIGNAL_SETTLES_S - 0.2) and ordered == []
        assert poll(0.2) and ordered == [now[0]]
        assert poll(slurm_ranks._GIVE_UP_AFTER_S) and srun.poll() is None
        assert poll(0.1) and srun.wait(60) == -signal.SIGKILL and len(ordered) == 1
        assert not poll()
    finally:
        srun.kill()
        srun.wait()


def test_the_command_of_thousands_of_nodes_is_short() -> None:
    """Catches an argument beyond the kernel's 128 KiB, and full node lists, which srun sends to every node."""
    command = of_nodes(16_000).command("host:1")
    assert command[command.index("--nodelist") + 1] == "n[0-9],n[10-99],n[100-999],n[1000-9999],n[10000-15999]"
    assert sum(map(len, command)) < 2000


def test_an_agent_gets_all_gpus_and_cpus_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an agent with one task's GPU or CPUs of a job with several tasks per node, and srun that refuses
    --ntasks-per-node beside an inherited --ntasks-per-gpu."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_"))]:
        monkeypatch.delenv(name)
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_NTASKS_PER_GPU": "1",
        "SLURM_CPUS_PER_TASK": "4",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURM_TASKS_PER_NODE": "8(x2),7",
        "SLURM_MEM_PER_CPU": "100",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "ask", lambda *_command: "")
    found = dataclasses.replace(slurm.find_allocation(), nodes=job(2).nodes)
    command = slurm_ranks.SlurmRanks(NodePart(Path("run"), ("-m", "module"), 8, 1), found, found.nodes).command("h:1")
    assert "--gpus-per-node=7" in command and "--cpus-per-task=28" in command
    left = {name for name in environment.for_srun() if name.startswith(("SLURM_", "SRUN_"))}
    assert left == {"SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURM_TASKS_PER_NODE", "SLURM_MEM_PER_CPU"}
    assert slurm.step_options(job(2)) == []
    # A whole node has more CPUs than its tasks asked for, and the fewest of the nodes count.
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64(x2),48")
    assert slurm.find_allocation().cpus_per_node == 48
    monkeypatch.setenv("SLURM_GPUS", "a100:5")
    monkeypatch.setattr(slurm, "_nodes", lambda names: job(2).nodes)
    with pytest.raises(ConfigError, match="--gpus = 5 gives the 2 nodes of the job different numbers of GPUs"):
        slurm.find_allocation()


@pytest.mark.parametrize(
    "changes",
    [
        {"hangs": HangSettings(20.0, 480.0, patience=4.0, saves_s=(2.0, 3.0))}, {"ranks_per_gpu": 2},
        {"one_hardware_queue": False, "cpu": True}, {"deepspeed": True},
    ],
)  # fmt: skip
def test_an_agent_parses_every_setting_of_its_node(changes: dict[str, Any]) -> None:
    """Catches a setting of the run that does not reach the nodes."""
    part = NodePart(Path("run"), ("-m", "module"), 4, 2, lease=3, heartbeat_timeout_s=30.0, **changes)
    nodes = (Node("a", "a"), Node("b", "b"))
    command = slurm_ranks.SlurmRanks(part, Allocation(SlurmJob("7", 0, ""), nodes), nodes).command("host:1")
    orders = node_agent.read_orders(command[command.index("megads.launch.node_agent") + 1 :])
    assert orders.part == part and (orders.host, orders.port) == ("host", 1)


def test_nodes_take_as_many_ranks_as_share_their_gpus() -> None:
    """Catches a layout that is refused or halved where ranks share GPUs."""
    shared = config(tp=4, pp=2)
    shared = dataclasses.replace(shared, cluster=dataclasses.replace(shared.cluster, ranks_per_gpu=4))
    assert assign_ranks_to_nodes(shared, job(2, gpus=1)).ranks_per_node == 4
    with pytest.raises(ConfigError, match="take 8 each"):
        assign_ranks_to_nodes(shared, job(2, gpus=2))


def test_agents_report_validations_and_saves_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a panel on SLURM without validation, and an agent that sends a message every step."""
    phases = ["engine step", "loading data", "validating, batch 1/2", "validating, batch 1/2", "saving", "engine step"]

    class RanksOfTheFirstNode(RanksThatStay):
        part = SimpleNamespace(node=0)

        def poll(self) -> bool:
            self.polls += 1
            return self.polls <= len(phases)

        def phase(self) -> str:
            return phases[self.polls - 1]

        @property
        def failing(self) -> bool:
            return False

    said = list[dict[str, Any]]()
    control = SimpleNamespace(send=said.append)
    node_agent._watch(RanksOfTheFirstNode(), control, [], lambda: False)  # type: ignore[arg-type]
    assert [message["phase"] for message in said] == ["validating, batch 1/2", "saving", ""]
    launcher: Any = SimpleNamespace(_phase="", _heard_s={}, _listened_s=0.0)
    for message in said[:2]:
        slurm_ranks.SlurmRanks._take(launcher, message)
    assert slurm_ranks.SlurmRanks.phase(launcher) == "saving"


@pytest.mark.parametrize(
    ("log", "code", "nodes", "said"),
    [
        ("srun: unrecognized option '--no-such'\nTry \"srun --help\"\n", 2, [""], "option '--no-such'"),
        (
            "slurmstepd-n1: error: execve(): apptainer: No such file or directory\nsrun: error: n1: task 0: Exited",
            *(2, [""], "execve(): apptainer"),
        ),
        ("srun: error: Unable to create step for job 7: Job credential expired\n", 2, [""], "credential expired"),
        ("srun: error: Unable to create step for job 7: Socket timed out on send/recv\n", 9, [""], "srun failed"),
        (
            "srun: error: Task launch for StepId=7.0 failed on node n1: Communication connection failure\n"
            "srun: error: Application launch failed: Communication connection failure\n",
            *(9, ["n1"], "lost"),
        ),
        ("", 2, [""], "it printed nothing"),
    ],
)  # fmt: skip
def test_a_failure_of_srun_is_told_from_a_lost_node(log: str, code: int, nodes: list[str], said: str) -> None:
    """Catches healthy nodes that are excluded because srun had a wrong option or the controller did not answer."""
    reports = slurm_ranks.srun_failure(log, ["n0", "n1"])
    assert [report.node for report in reports] == nodes and reports[0].exit_code == code
    assert said in reports[0].error
