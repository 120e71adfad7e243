"""Run directories as training leaves them, written by its own writers and hooks, without training."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from pathlib import Path

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.model.moe_config import MoEConfig
from megads.monitor.experts import ExpertsHook
from megads.monitor.hooks import MetricsHook
from megads.resilience.hooks import NonFiniteHook
from megads.runtime.hooks import ExpertStatistics, StepInfo
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.run_dir import CONFIG_FILE

# The hooks record the current time, which must fall into the third start of an eventful run.
BEGIN = time.time() - 210
STEP_TIME_S = 0.5
CULPRIT = "rank 3, backward: blocks.1.mlp.up.weight"


def falling_loss(step: int) -> float:
    return 4.0 + 5.5 * math.exp(-step / 60) + random.Random(step).gauss(0, 0.15)


def write_config(run_dir: Path, run_id: str) -> RootConfig:
    run_dir.mkdir(parents=True, exist_ok=True)
    config = RootConfig()
    config.run.id, config.train.steps = run_id, 1000
    freeze(config, run_dir / CONFIG_FILE)
    return config


def write_steps(
    run_dir: Path,
    first: int,
    last: int,
    loss: Callable[[int], float] = falling_loss,
    skipped: Collection[int] = (),
    step_time_s: Callable[[int], float] = lambda step: STEP_TIME_S * (1 + 0.1 * random.Random(-step).random()),
    length: int = 128,
) -> None:
    """Writes steps `first` to `last` of one start."""
    metrics, events = MetricsWriter(run_dir, enabled=True), EventWriter(run_dir)
    lines, skips = MetricsHook(metrics, 1e7, 4, 0.1), NonFiniteHook(events, 10**9)
    for step in range(first, last + 1):
        norm = math.nan if step in skipped else 0.8 + 0.4 * random.Random(step + 0.5).random()
        info = StepInfo(
            step=step, samples=8 * step, tokens=1024 * step, loss=loss(step), grad_norm=norm,
            lr=3e-4 * min(step / 20, 1), global_batch_size=8, seq_len=length, step_time_s=step_time_s(step),
            data_time_s=0.02, skipped=step in skipped, culprit=CULPRIT if step in skipped else "",
            batch_hash=f"{step:016x}",
        )  # fmt: skip
        lines.on_step(info)
        skips.on_step(info)
    metrics.close()
    events.close()


def write_experts(run_dir: Path, first: int, last: int) -> None:
    """Writes steps of a model with four experts in the layers 1 and 3; those of layer 3 are idle up to step 60."""
    metrics, events = MetricsWriter(run_dir, enabled=True), EventWriter(run_dir)
    lines = MetricsHook(metrics, 1e7, 4, 0.1)
    by_layer = ExpertsHook(MoEConfig(num_experts=4, top_k=1), metrics, events, 10, idle_steps=50)
    for step in range(first, last + 1):
        busy = [16.0, 0.0, 0.0, 0.0] if step <= 60 else [4.0, 4.0, 6.0, 2.0]
        rows = [[5.0, 3.0, 4.0, 4.0, 0.2, 0.1, 20.0], [*busy, 0.3, 0.1, 16.0]]
        info = StepInfo(
            step=step, samples=8 * step, tokens=16 * step, loss=falling_loss(step), grad_norm=1.0, lr=1e-3,
            global_batch_size=8, seq_len=2, step_time_s=0.1, data_time_s=0.0, skipped=False, culprit="",
            batch_hash=f"{step:016x}", experts=ExpertStatistics.from_sums([1, 3], 1, rows),
        )  # fmt: skip
        lines.on_step(info)
        by_layer.on_step(info)
    metrics.close()
    events.close()


def write_validation(run_dir: Path, step: int, loss: float, name: str = "held_out", unigram_loss: float = 6.2) -> None:
    metrics = MetricsWriter(run_dir, enabled=True)
    metrics.write(
        {
            "step": step,
            "samples": 8 * step,
            "tokens": 1024 * step,
            f"valid/{name}/loss": loss,
            f"valid/{name}/ppl": math.exp(min(loss, 700)),
            f"valid/{name}/unigram_loss": unigram_loss,
        }
    )
    metrics.close()


def write_start(run_dir: Path, step: int, at: float) -> None:
    """Writes the events of the launcher and rank 0 at a start."""
    events = EventWriter(run_dir)
    events.write("launch", time=at, ranks=4, pid=1, level="debug")
    if step:
        events.write("resume", time=at + 1, step=step, checkpoint=f"step_{step:08d}", skipped=[])
    events.write(
        "start", time=at + 1, step=step, total_steps=1000, parameters=624_512, precision="bf16",
        layout="tp2 pp2 dp1", stages=[0, 2, 5], device="cpu", threads_per_rank=1, config_digest="0123456789abcdef" * 4,
    )  # fmt: skip
    events.close()


def write_events(run_dir: Path, *events: tuple[str, dict[str, object]]) -> None:
    writer = EventWriter(run_dir)
    for name, fields in events:
        writer.write(name, **fields)
    writer.close()


def write_eventful_run(run_dir: Path, run_id: str = "eventful") -> None:
    """Writes 300 steps in three starts: a kill, a failure, a requested stop; skips, a loss spike, text like markup."""
    write_config(run_dir, run_id)
    write_start(run_dir, 0, BEGIN)
    write_steps(run_dir, 1, 100)
    write_validation(run_dir, 100, 5.4)
    write_events(
        run_dir, ("checkpoint_saved", {"time": BEGIN + 55, "step": 100, "folder": "step_00000100", "save_s": 0.1})
    )
    write_start(run_dir, 100, BEGIN + 90)
    write_steps(
        run_dir, 101, 200, loss=lambda step: math.inf if step == 150 else falling_loss(step), skipped=(150, 151)
    )
    write_validation(run_dir, 200, 4.6)
    write_events(
        run_dir,
        ("checkpoint_saved", {"time": BEGIN + 150, "step": 200, "folder": "step_00000200", "save_s": 0.1}),
        (
            "failure",
            {
                "time": BEGIN + 151,
                "level": "error",
                "rank": 2,
                "exit_code": 1,
                "message": "<script>alert(1)</script> & co",
            },
        ),
        ("exit", {"time": BEGIN + 152, "exit_code": 1, "level": "debug"}),
    )
    write_start(run_dir, 200, BEGIN + 180)
    write_steps(run_dir, 201, 300, loss=lambda step: 900.0 if step == 250 else falling_loss(step))
    write_validation(run_dir, 300, 4.3)
    write_events(
        run_dir,
        ("stop_requested", {"time": BEGIN + 230, "level": "debug", "signal": "SIGINT", "reason": "interrupted"}),
        ("checkpoint_saved", {"time": BEGIN + 232, "step": 300, "folder": "step_00000300", "save_s": 0.1}),
        ("end", {"time": BEGIN + 233, "step": 300, "stopped": "interrupted"}),
        ("exit", {"time": BEGIN + 234, "exit_code": 5, "level": "debug"}),
    )
