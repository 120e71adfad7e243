#!/usr/bin/env python3
"""Predicted step times on one GPU, from a calibration done just before, compared with measured steps.

    python -m scripts.bench.gpu_plan [--device cuda] [--append bench.jsonl]

`megads calibrate ranks=1` measures the GPU, then the real engine trains models that the calibration did not train: 124M
to 1.4 billion parameters, like BLOOM, GPT-3 and Llama, 1,024 to 8,192 tokens per sample, with and without
recomputation. Each is predicted from the calibration and, if megads.tools.plan.devices has the GPU, from its table.
Nothing is fitted to these steps. The attention kernel is that of model.attention=auto. A step is timed with device
events, synchronizing before and after; median.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megads.engine.micro_batch_graphs import EAGER_STEPS
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.model_size import parameter_count
from megads.parallel.config import ParallelConfig, Recompute
from megads.runtime.environment import child_environment
from megads.runtime.process import disable_reduced_precision_sums, make_deterministic
from megads.tools.plan.calibrate.config import CalibrateConfig
from megads.tools.plan.calibrate.measure import calibrate, gpu_kernels, write
from megads.tools.plan.devices import DEVICES, Device, built_in_device_of, read_device
from megads.tools.plan.execution import MEGADS
from megads.tools.plan.step_estimate import StepEstimate, StepModel
from megads.tools.plan.workload import Workload
from scripts.bench.device_clock import step_seconds
from scripts.bench.gpu_table import Line, add_line_options, appender
from scripts.bench.processes import ONE_RANK
from scripts.bench.training_sides import TrainingWork, megads_side

WARM_UP, TIMED = EAGER_STEPS + 1, 4
"""Warmup steps and timed steps."""
WITHIN = 0.1
"""Relative error of an accurate prediction."""


@dataclass(frozen=True)
class PlannedRow:
    """A step that is predicted and measured.

    Attributes:
        like: bloom, gpt (learned positions) or llama.
        layers, hidden, heads, vocabulary: model shape.
        seq_len, micro_batch, micro_batches: shape of the step.
        recompute: parallel.recompute.
        kv_heads, ffn: KV heads and MLP width of Llama models.
        cuda_graphs: ops.cuda_graphs.
    """

    like: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    recompute: str = "none"
    kv_heads: int | None = None
    ffn: int | None = None
    cuda_graphs: bool = False

    @property
    def name(self) -> str:
        recompute = "" if self.recompute == "none" else f" {self.recompute}"
        recompute += " graphs" if self.cuda_graphs else ""
        return (
            f"{self.like} L{self.layers} h{self.hidden} V{self.vocabulary} S{self.seq_len} "
            f"b{self.micro_batch}x{self.micro_batches}{recompute}"
        )

    @property
    def model(self) -> ModelConfig:
        """Model shape."""
        found = ModelConfig(
            num_layers=self.layers, hidden_size=self.hidden, num_heads=self.heads, vocab_size=self.vocabulary,
            max_seq_len=self.seq_len,
        )  # fmt: skip
        if self.like == "bloom":
            return found
        if self.like == "gpt":
            return replace(found, position=Position.learned, embedding_norm=False)
        return replace(
            found, num_kv_heads=self.kv_heads, ffn_size=self.ffn, position=Position.rope, norm=NormKind.rmsnorm,
            mlp=MLPKind.swiglu, bias=False, embedding_norm=False, tie_embeddings=False,
        )  # fmt: skip

    def work(self, device: str) -> TrainingWork:
        """What the engine trains."""
        return TrainingWork(
            self.layers, self.hidden, self.heads, self.vocabulary, self.micro_batch * self.micro_batches, self.seq_len,
            "bf16", device, self.micro_batch, self.recompute, 1e-4, shape=self.model,
        )  # fmt: skip

    def planned(self, device: Device) -> StepEstimate:
        """Predicted step by a device's table."""
        shape = Workload(self.seq_len, self.micro_batch, self.micro_batches)
        layout = ParallelConfig(recompute=Recompute(self.recompute))
        execution = replace(MEGADS, repeatable=True, cuda_graphs=self.cuda_graphs)
        return StepModel(self.model, layout, shape, device, execution=execution).estimate()


BUSY_OR_NOT = (
    PlannedRow("gpt", 12, 768, 12, 50304, 1024, 8, 2),
    PlannedRow("gpt", 24, 1024, 16, 50304, 2048, 1, 8, "selective"),
    PlannedRow("gpt", 24, 2048, 16, 50368, 2048, 8, 2),
    PlannedRow("bloom", 24, 1024, 16, 250880, 2048, 4, 2),
    PlannedRow("bloom", 24, 1536, 12, 50304, 2048, 4, 4, "full"),
    PlannedRow("llama", 16, 2048, 32, 128256, 2048, 4, 2, kv_heads=8, ffn=8192),
    PlannedRow("llama", 12, 2048, 16, 32000, 8192, 1, 4, ffn=5632),
    PlannedRow("llama", 5, 4096, 32, 32000, 4096, 1, 4, "full", 8, 14336),
)
ROWS = (*BUSY_OR_NOT, *(replace(row, cuda_graphs=True) for row in BUSY_OR_NOT[:2] + BUSY_OR_NOT[3:5]))
"""All rows, and those that are bound by the host again with CUDA graphs."""
SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "seq_len": 64, "micro_batch": 2}
"""Smoke test on a CPU."""


def rows_for(device: str) -> list[PlannedRow]:
    """Returns the rows; on a CPU one model of each kind."""
    if device == "cuda":
        return list(ROWS)
    llama: dict[str, Any] = {"kv_heads": 2, "ffn": 128}
    return [replace(row, **SMALL, **(llama if row.like == "llama" else {})) for row in BUSY_OR_NOT[1::2]]


def measured_s(row: PlannedRow, device: str) -> float:
    """Median seconds of a step."""
    gc.unfreeze()  # the previous engine froze existing objects
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.compiler.reset()  # it stops compiling after eight shapes
    implementation = "auto" if device == "cpu" else gpu_kernels().model.value
    turn = megads_side(row.work(device), implementation, cuda_graphs=row.cuda_graphs)
    for _ in range(WARM_UP):
        turn()
    return statistics.median(step_seconds(turn, device) for _ in range(TIMED))


def line_of(row: PlannedRow, measured: float, calibrated: Device, shipped: Device | None) -> Line:
    """Returns the result line of a row."""
    planned = row.planned(calibrated)
    line: Line = {
        "name": f"plan, {row.name}", "row": row.name, "parameters": parameter_count(row.model), "step_s": measured,
        "calibrated_s": planned.step_time_s, "parts": planned.parts, "shipped": shipped.name if shipped else None,
        "shipped_s": row.planned(shipped).step_time_s if shipped else None,
    }  # fmt: skip
    said = f"{1e3 * measured:.1f} ms, calibrated {error(line, 'calibrated_s')}"
    return line | {"verdict": said + (f", {shipped.name} {error(line, 'shipped_s')}" if shipped else "")}


def error(line: Line, plan: str) -> str:
    """Formats the relative error of a prediction."""
    return "-" if line[plan] is None else f"{line[plan] / line['step_s'] - 1:+.1%}"


def summary(lines: list[Line]) -> str:
    """Summarizes the errors of both predictions."""
    said = []
    for name, plan in (("calibrated", "calibrated_s"), ("shipped", "shipped_s")):
        errors = [abs(line[plan] / line["step_s"] - 1) for line in lines if line[plan]]
        if errors:
            within = sum(one <= WITHIN for one in errors)
            mean = statistics.fmean(errors)
            said.append(
                f"{name}: {within} of {len(errors)} within {WITHIN:.0%}, mean {mean:.1%}, worst {max(errors):.1%}"
            )
    return "; ".join(said)


def main() -> int:
    """Calibrates, trains, predicts, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of measurement per operator")
    parser.add_argument("--file", type=Path, help="file of the calibration; used if it exists, else written")
    arguments = parser.parse_args()
    append, begin = appender(arguments, "gpu_plan"), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "device.yaml"
        if not path.exists():
            asked = CalibrateConfig(out=str(path), ranks=1, seconds=arguments.seconds)
            asked.check()
            write(asked, calibrate(asked))
            print(f"calibrated in {time.perf_counter() - begin:.0f} s", flush=True)
        print(path.read_text(encoding="utf-8"), flush=True)
        calibrated = read_device(path)
    known = built_in_device_of(torch.cuda.get_device_name()) if arguments.device == "cuda" else None
    lines: list[Line] = []
    with child_environment(ONE_RANK):
        disable_reduced_precision_sums()
        make_deterministic(torch.device(arguments.device))
        for row in rows_for(arguments.device):
            try:
                seconds = measured_s(row, arguments.device)
            except torch.OutOfMemoryError as reason:
                print(f"{row.name}: out of memory ({str(reason).splitlines()[0]})", flush=True)
                continue
            lines.append(line_of(row, seconds, calibrated, DEVICES[known] if known else None))
            append(lines[-1])
            print(f"{time.perf_counter() - begin:5.0f} s: {lines[-1]['name']}: {lines[-1]['verdict']}", flush=True)
            parts = sorted(lines[-1]["parts"].items(), key=lambda part: -part[1])
            print("         " + ", ".join(f"{name} {1e3 * part_s:.1f}" for name, part_s in parts), flush=True)
    append({"name": "plan, all", "verdict": summary(lines)})
    print(summary(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
