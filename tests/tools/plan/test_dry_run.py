"""Warnings of a dry run: a table of configs, and the command itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.data.config import DatasetConfig
from megads.tools.plan.dry_run import LastStart, plan_warnings
from tests.fork_server import ForkServer


def plan(**changes: Any) -> RootConfig:
    """A config of 200 steps of 8 samples without warnings, with changes; `__` stands for a dot."""
    config = RootConfig()
    values = {
        "train__steps": 200, "train__seq_len": 1024, "model__max_seq_len": 2048, "model__vocab_size": 1000,
        "schedule__warmup_samples": 80, "optim__lr": 1e-3, "optim__min_lr": 1e-4,
    } | changes  # fmt: skip
    for name, value in values.items():
        section, key = name.split("__")
        setattr(getattr(config, section), key, value)
    return config


@pytest.mark.parametrize(
    ("changes", "tokenizer_tokens", "said"),
    [
        ({}, 1000, ""),
        ({}, None, ""),
        ({"train__seq_len": 513}, 1000, ""),
        ({"train__seq_len": 512}, 1000, "train.seq_len = 512 is far below model.max_seq_len = 2,048"),
        # Padded, or with unused ids: GPT-2's 50,304 and BLOOM's 250,880 rows.
        ({"model__vocab_size": 50304}, 50257, ""),
        ({"model__vocab_size": 250880}, 250680, ""),
        ({"model__vocab_size": None}, 700, ""),
        ({"model__vocab_size": 50257}, 1024, "the tokenizer has 1,024 tokens: the other 49,233 rows are never trained"),
        (
            {"model__attention_logit_softcap": 50.0},
            None,
            "the attention scores of a micro-batch are materialized, 8.0 MiB per block",
        ),
        ({"schedule__warmup_samples": 0, "train__steps": 99}, None, ""),
        ({"schedule__warmup_samples": 0}, None, "schedule.warmup_samples=16 is a hundredth of the run"),
        ({"schedule__warmup_samples": 1600}, None, ""),
        ({"schedule__warmup_samples": 3200}, None, "rises to 0.0005 and never reaches optim.lr = 0.001; train longer"),
        ({"train__steps": "auto", "schedule__warmup_samples": 10**9}, None, ""),
        ({"optim__min_lr": 0.0, "schedule__name": "constant"}, None, ""),
        ({"optim__min_lr": 0.0}, None, "the learning rate is 0 in step 200, the last, which changes no weight"),
        ({"optim__min_lr": 0.0}, None, "optim.min_lr=0.0001"),
        ({"optim__min_lr": 0.0, "schedule__decay_samples": 1597}, None, "is 0 in step 200"),
        ({"optim__min_lr": 0.0, "schedule__decay_samples": 800}, None, "is 0 in steps 100 to 200, which change no"),
        ({"optim__min_lr": 0.0, "schedule__decay_samples": 801, "schedule__name": "linear"}, None, "steps 101 to 200"),
        ({"optim__min_lr": 0.0, "schedule__decay_samples": 2000}, None, ""),
    ],
)
def test_plans(changes: dict[str, Any], tokenizer_tokens: int | None, said: str) -> None:
    """Catches a suspicious config without a warning, and a good one with a warning."""
    warnings = plan_warnings(plan(**changes), tokenizer_tokens)
    assert len(warnings) == bool(said), warnings
    assert said in "".join(warnings)


LONGER = "was planned to end at 800 samples, and now ends at 1,600: at step 51 the rate is"


@pytest.mark.parametrize(
    ("before", "now", "step", "said"),
    [
        ({"train__steps": 200}, {}, 50, ""),
        ({"train__steps": 100}, {}, 50, f"{LONGER} 0.0009 in place of 0.000613; schedule.decay_samples=800 keeps"),
        ({"train__steps": 100}, {"schedule__decay_samples": 800}, 50, ""),
        ({"train__steps": 100, "schedule__name": "constant"}, {"schedule__name": "constant"}, 50, ""),
        ({"train__steps": 100, "schedule__name": "constant"}, {}, 50, LONGER),
        ({"train__steps": 200}, {"train__steps": 50}, 50, ""),
        ({"train__steps": 200}, {"train__steps": 49, "schedule__warmup_samples": 8}, 50,
         "the run's newest checkpoint is of step 50, beyond train.steps = 49"),
    ],
)  # fmt: skip
def test_runs_that_go_on(before: dict[str, Any], now: dict[str, Any], step: int, said: str) -> None:
    """Catches no warning of a learning rate that jumps when a run is extended, or of a command that trains nothing."""
    warnings = plan_warnings(plan(**now), 1000, LastStart(step, plan(**before)))
    assert len(warnings) == bool(said), warnings
    assert said in "".join(warnings)


def test_a_dry_run_says_them(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches warnings that are not printed, and a dry run that ignores the run's own last start."""
    (tmp_path / "a.txt").write_text("A line of text, and one more.\n" * 200)
    command = (
        "train",
        "data.raw=a.txt",
        "model.vocab_size=9999",
        "train.steps=40",
        "run.id=mine",
        "run.dry_run=true",
        "train.seq_len=64",
        "optim.min_lr=0",
        "schedule.warmup_samples=8",
    )
    first = fork_server(tmp_path, command)
    assert first.code == 0, first.err
    warnings = [line for line in first.out.splitlines() if line.startswith("warning: ")]
    assert [warning.split()[1] for warning in warnings] == ["train.seq_len", "model.vocab_size", "the"]
    config = plan(train__steps=30)
    config.data.train = [DatasetConfig("x")]
    (tmp_path / "runs" / "mine" / "checkpoints" / "step_00000050").mkdir(parents=True)
    freeze(dataclasses.replace(config), tmp_path / "runs" / "mine" / "config.yaml")
    second = fork_server(tmp_path, command)
    assert "warning: the run's newest checkpoint is of step 50, beyond train.steps = 40" in second.out, second.err
