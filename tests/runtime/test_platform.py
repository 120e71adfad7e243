"""Which rank a platform started this process as; variables that do not fit are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megads.cli.entry import run_verb
from megads.cli.train import VERB
from megads.errors import ConfigError
from megads.runtime.config import ClusterKind
from megads.runtime.platform import find_platform_rank, main

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "MASTER_ADDR": "n1",
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*WHOLE, "LOCAL_RANK", "CLUSTER_SPEC")
    others = ("SLURM_", "TORCHELASTIC_", "SM_", "PET_", "VC_")
    for name in [name for name in os.environ if name in names or name.startswith(others)]:
        monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_complete_variables_of_a_platform_name_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a PyTorchJob, which sets no LOCAL_RANK, whose pods each train a model, and a store that torchrun serves
    and rank 0 would serve again."""
    assert find_platform_rank(ClusterKind.auto) is None
    given(monkeypatch, WHOLE)
    found = find_platform_rank(ClusterKind.auto)
    assert found is not None and (found.rank, found.world_size, found.local_rank) == (1, 2, None)
    assert (found.host, found.port, found.serves) == ("10.0.0.1", 29500, True)
    assert find_platform_rank(ClusterKind.local) is None
    given(monkeypatch, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    given(monkeypatch, {"TORCHELASTIC_RESTART_COUNT": "2"})
    found = find_platform_rank(ClusterKind.external)
    assert found is not None and (found.local_rank, found.serves, found.attempt) == (1, False, "2")


def test_a_platform_with_one_process_leaves_the_ranks_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pod with eight GPUs in which only one rank may train, and a script's MASTER_ADDR taken for a rank."""
    given(monkeypatch, {"MASTER_ADDR": "here", "MASTER_PORT": "29500"})
    assert find_platform_rank(ClusterKind.auto) is None
    given(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert find_platform_rank(ClusterKind.auto) is None
    assert find_platform_rank(ClusterKind.external) is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"MASTER_PORT": ""}, "RANK = 1 and WORLD_SIZE = 2 and MASTER_ADDR = 10.0.0.1 in the environment, without"),
        ({"RANK": ""}, "without RANK"),
        ({"RANK": "2"}, "RANK = 2 in the environment, but WORLD_SIZE = 2"),
        ({"RANK": "one"}, "RANK = one in the environment: want a whole number"),
        ({"LOCAL_RANK": "5"}, "LOCAL_RANK = 5 in the environment, but WORLD_SIZE = 2"),
        ({"MASTER_PORT": "66000"}, "MASTER_PORT = 66000"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE = -2 in the environment"),
    ],
)
def test_inconsistent_variables_of_a_platform_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], named: str
) -> None:
    """Catches a rank that trains a model of its own because one variable is missing or wrong."""
    given(monkeypatch, WHOLE | changes)
    for kind in (ClusterKind.auto, ClusterKind.external):
        with pytest.raises(ConfigError) as refused:
            find_platform_rank(kind)
        assert named in str(refused.value)
    assert find_platform_rank(ClusterKind.local) is None


def test_external_without_a_platform_is_refused() -> None:
    """Catches a run that waits for processes that nobody starts."""
    with pytest.raises(ConfigError, match=r"RANK and WORLD_SIZE are not set.*torchrun"):
        find_platform_rank(ClusterKind.external)


def test_a_task_of_a_slurm_step_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one srun task per rank, each of which starts a launcher, with and without cluster=slurm; and a batch
    script or `srun --pty` taken for one."""
    given(monkeypatch, {name: value for name, value in STEP.items() if name != "SLURM_STEP_NUM_TASKS"})
    assert find_platform_rank(ClusterKind.auto) is None
    given(monkeypatch, STEP)
    found = find_platform_rank(ClusterKind.auto)
    assert found is not None and (found.rank, found.world_size, found.local_rank, found.host) == (3, 4, 1, "n1")
    assert 15000 <= found.port < 30000
    with pytest.raises(ConfigError, match=r"srun has started 4 launchers, of which this is number 3"):
        find_platform_rank(ClusterKind.slurm)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert find_platform_rank(ClusterKind.slurm) is None and find_platform_rank(ClusterKind.auto) is None


SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "1"}
POOLS = {
    "workerpool0": ["pool-0-0:2222"],
    "workerpool1": ["pool-1-0:2222", "pool-1-1:2222"],
    "workerpool2": ["server:2222"],
}
VERTEX = {"CLUSTER_SPEC": json.dumps({"cluster": POOLS, "task": {"type": "workerpool1", "index": 1}})}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "bloom-node-0-0.bloom",
    "PET_MASTER_PORT": "29500",
}
VOLCANO = {
    "VC_MASTER_HOSTS": "bloom-master-0.bloom",
    "VC_WORKER_HOSTS": "bloom-worker-0.bloom,bloom-worker-1.bloom",
    "SLURMD_NODENAME": "bloom-worker-1",  # the host name that node_name() returns
}


@pytest.mark.parametrize(
    ("variables", "expected", "options"),
    [
        (SAGEMAKER, (1, 2, "algo-1", 29500), "--nnodes=2 --nproc-per-node=1 "),
        (VERTEX, (2, 3, "pool-0-0", 2222), "--nnodes=3 --nproc-per-node=auto "),
        (TRAIN_JOB, (1, 2, "bloom-node-0-0.bloom", 29500), "--nnodes=2 --nproc-per-node=1 "),
        (VOLCANO, (2, 3, "bloom-master-0.bloom", 29500), "--nnodes=3 --nproc-per-node=auto "),
    ],
    ids=["sagemaker", "vertex", "trainjob", "volcano"],
)
def test_the_only_process_of_a_machine_is_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    expected: tuple[int, int, str, int],
    options: str,
) -> None:
    """Catches a platform that describes machines, not ranks, each of which trains a model of its own, and options with
    which torchrun's agents do not meet."""
    given(monkeypatch, variables)
    for kind in (ClusterKind.auto, ClusterKind.external):
        found = find_platform_rank(kind)
        assert found is not None and (found.rank, found.world_size, found.host, found.port) == expected
        assert found.serves and found.local_rank is None
    assert find_platform_rank(ClusterKind.local) is None
    assert main() == 0
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={expected[2]}:{expected[3]} --rdzv-id=megads"
    assert capsys.readouterr().out == f"{options}{meeting}\n"
    given(monkeypatch, WHOLE)
    found = find_platform_rank(ClusterKind.auto)
    assert found is not None and (found.rank, found.host) == (1, "10.0.0.1"), "torchrun's variables come first"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (
            SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST = algo-3 in the environment is not one of SM_HOSTS",
        ),
        (SAGEMAKER | {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS = algo-1,algo-2 in the environment: want a JSON list"),
        (SAGEMAKER | {"SM_NUM_GPUS": "8"}, "SM_HOSTS of SageMaker: 2 machines with 8 processes each"),
        ({"CLUSTER_SPEC": "{}"}, "CLUSTER_SPEC in the environment names no worker"),
        (
            {"CLUSTER_SPEC": json.dumps({"cluster": POOLS, "task": {"type": "workerpool2", "index": 0}})},
            "names no worker of workerpool0 or workerpool1 (KeyError: 'workerpool2')",
        ),
        (TRAIN_JOB | {"PET_NODE_RANK": "2"}, "PET_NNODES of Kubeflow: this is machine 2 of 2"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "gpu"}, "2 machines with gpu processes each"),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "x:1"}, "PET_NNODES = 1:4 and PET_RDZV_ENDPOINT = x:1"),
        (
            VOLCANO | {"SLURMD_NODENAME": "elsewhere"},
            "VC_MASTER_HOSTS, VC_WORKER_HOSTS of Volcano: this host, elsewhere",
        ),
        (WHOLE | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE = 8 in the environment: a PyTorchJob"),
    ],
)
def test_variables_of_machines_that_name_no_rank_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    """Catches machines that train a model each because their variables were not understood, or because the platform
    left it to torchrun to start the ranks."""
    given(monkeypatch, variables)
    for kind in (ClusterKind.auto, ClusterKind.external):
        with pytest.raises(ConfigError) as refused:
            find_platform_rank(kind)
        assert named in str(refused.value)


@pytest.mark.parametrize(
    "variables",
    [
        SAGEMAKER | {"SM_HOSTS": '["algo-2"]', "SM_NUM_GPUS": "8"},
        {
            "CLUSTER_SPEC": json.dumps(
                {"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}}
            )
        },
        TRAIN_JOB | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8"},
        {"VC_WORKER_HOSTS": "bloom-worker-1.bloom", "SLURMD_NODENAME": "bloom-worker-1"},
    ],
    ids=["sagemaker", "vertex", "trainjob", "volcano"],
)
def test_a_single_machine_leaves_its_ranks_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Catches a machine with eight GPUs on which only one rank may train."""
    given(monkeypatch, variables)
    assert find_platform_rank(ClusterKind.auto) is None


def test_hosts_of_sagemaker_without_its_toolkit_are_read_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an image without SageMaker's training toolkit, on every host of which a model of its own is trained."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    assert find_platform_rank(ClusterKind.auto) is None and main() == 2
    assert "no platform has started this container" in capsys.readouterr().err
    file = tmp_path / "input/config/resourceconfig.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}')
    found = find_platform_rank(ClusterKind.auto)
    assert found is not None and (found.rank, found.world_size, found.host) == (1, 2, "algo-1")
    assert main() == 0 and "--nnodes=2 --nproc-per-node=auto" in capsys.readouterr().out
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"resourceconfig.json = { in the environment: want a JSON object"):
        find_platform_rank(ClusterKind.auto)
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"resourceconfig.json, which says .* cannot be read"):
        find_platform_rank(ClusterKind.auto)


def test_a_sweep_is_not_started_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches as many drivers of one sweep as a platform starts processes."""
    given(monkeypatch, WHOLE)
    assert run_verb(VERB, ["-m", "train.steps=1,2"]) == 2
    assert "RANK and WORLD_SIZE started 2 processes" in capsys.readouterr().err
