"""Which rank a platform started this process as; variables that do not fit are refused by name."""

from __future__ import annotations

import os

import pytest

from megads.cli.entry import run_verb
from megads.cli.train import VERB
from megads.errors import ConfigError
from megads.runtime.config import ClusterKind
from megads.runtime.platform import find_platform_rank

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
    names = (*WHOLE, "LOCAL_RANK")
    for name in [name for name in os.environ if name in names or name.startswith(("SLURM_", "TORCHELASTIC_"))]:
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


def test_a_sweep_is_not_started_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches as many drivers of one sweep as a platform starts processes."""
    given(monkeypatch, WHOLE)
    assert run_verb(VERB, ["-m", "train.steps=1,2"]) == 2
    assert "RANK and WORLD_SIZE started 2 processes" in capsys.readouterr().err
