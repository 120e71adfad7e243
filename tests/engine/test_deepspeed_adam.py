"""DeepSpeed's CPUAdam in the engines of all ZeRO stages: parity with `hot_weights` weights, resume, rejections.

Its first use compiles it: two minutes of CPU time, once per machine. FusedAdam needs a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megads.cli.main import run
from megads.engine.deepspeed_adam import DeepSpeedAdamW
from megads.errors import ConfigError
from megads.ops import resolve
from megads.ops.build import KernelsUnavailable
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.optim.masters import MasterUpdate
from tests import parity
from tests.command import StartCommand, checkpoint_of, checksums, small_model, steps_of
from tests.parity import LAYOUTS, scenario_with, train_layout

OPTIM = OptimConfig(impl=Implementation.deepspeed)
SCENARIO = scenario_with(steps=5, optimizer=OPTIM)


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compiles CPUAdam before ranks start, whose results a test waits for only so long."""
    subprocess.run([sys.executable, "-m", "megads.engine.deepspeed_adam", "cpu"], check=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("layout", ["tp2dp2", "pp2dp2, ZeRO-0", "tp2pp2dp2", "cp2", "zero2dp2", "zero3tp2dp2"])
def test_cpu_adam_equals_the_reference_in_every_layout(layout: str) -> None:
    """Catches a bias correction, weight decay or eps that differs from AdamW's, a master updated with the step count of
    another, and replicas that diverge."""
    assert parity.faults_of(train_layout(SCENARIO, LAYOUTS[layout]), SCENARIO) == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_killed_run_with_cpu_adam_continues_bit_for_bit(zero_stage: int, corpus: Path, megads: StartCommand) -> None:
    """Catches powers of the betas that CPUAdam accumulates from step to step and a new process recomputes."""
    layout = {"parallel__dp": 2, "parallel__zero_stage": zero_stage, "optim__impl": "deepspeed", "train__steps": 6}
    runs = megads.folder / "whole", megads.folder / "killed"
    whole, killed = (small_model(corpus, run__dir=run, checkpoint__every_steps=2, **layout) for run in runs)
    ended = megads("train", *whole).end()
    assert ended.code == 0, ended.err
    assert "DeepSpeed's CPUAdam" in ended.out
    command = megads("train", *killed)
    command.wait_for(lambda: any(line["step"] >= 3 for line in steps_of(runs[1])))
    command.kill_everything()
    assert megads("train", *killed).end().code == 0
    assert steps_of(runs[1]) == steps_of(runs[0])
    assert checksums(checkpoint_of(runs[1], 6)) == checksums(checkpoint_of(runs[0], 6))


@pytest.mark.slow
def test_a_cpu_adam_step_does_not_depend_on_earlier_calls() -> None:
    """Catches the same: step 1,000 is bit-identical with and without step 999 before it, and equals AdamW's."""
    generator = torch.Generator().manual_seed(1)
    weight, grad, first = (torch.randn(1000, generator=generator) for _ in range(3))
    second = torch.rand(1000, generator=generator)

    def stepped(*steps: int) -> torch.Tensor:
        rule = DeepSpeedAdamW(OPTIM, torch.device("cpu"))
        for step in steps:
            master, state = weight.clone(), {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}
            rule([MasterUpdate(master, grad.clone(), state, 1e-3, 0.1, step)])
        return master

    assert torch.equal(stepped(998, 999, 1000), stepped(1000))
    beta1, beta2 = OPTIM.betas
    mean = first.double().lerp(grad.double(), 1 - beta1) / (1 - beta1**1000)
    variance = (beta2 * second.double() + (1 - beta2) * grad.double().square()) / (1 - beta2**1000)
    wanted = weight.double() * (1 - 1e-3 * 0.1) - 1e-3 * mean / (variance.sqrt() + OPTIM.eps)
    torch.testing.assert_close(stepped(1000).double(), wanted, rtol=1e-6, atol=1e-7)


def test_bad_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Catches ranks that start and then fail to compile, and settings without effect."""
    monkeypatch.chdir(tmp_path)
    cases = (
        (["ops.impl=deepspeed"], "ops.impl = deepspeed: DeepSpeed has kernels of the optimizer only"),
        (["optim.impl=deepspeed", "optim.name=lamb"], "optim.impl = deepspeed only applies to optim.name=adamw"),
        (["optim.impl=fused", "parallel.zero_stage=3", "parallel.dp=2"], "use optim.impl=auto"),
    )
    for overrides, expected in cases:
        assert run(["train", "train.steps=1", "data.train=[{path: x}]", "run.dry_run=true", *overrides]) == 2
        assert expected in capsys.readouterr().err

    def none() -> str:
        raise KernelsUnavailable("there is no C++ compiler: install one")

    with monkeypatch.context() as patch:
        patch.setattr(resolve, "find_compiler", none)
        with pytest.raises(ConfigError, match="impl = deepspeed cannot run: there is no C"):
            resolve.choose(OpsConfig(Implementation.torch), cuda=False, optimizer=Implementation.deepspeed)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(resolve, "find_compiler", lambda: "c++")
    with pytest.raises(ConfigError, match="ninja, which is not on the path"):
        resolve.choose(OpsConfig(Implementation.torch), cuda=False, optimizer=Implementation.deepspeed)
