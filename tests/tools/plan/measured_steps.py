"""Layouts and shapes whose steps `scripts.bench.plan_measured` measures, and the stored run; does not import torch.

The halves alternate: fit rows may guide changes of megads/tools/plan, judge rows may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.tools.plan.devices import device_from
from megads.tools.plan.execution import MEGADS
from megads.tools.plan.step_estimate import StepEstimate, StepModel
from megads.tools.plan.workload import Workload

STORED = Path(__file__).with_suffix(".yaml")

_ENUMS = {"recompute": Recompute, "schedule": ScheduleName}


@dataclass(frozen=True)
class MeasuredRow:
    """A step that is measured and predicted.

    Attributes:
        like: bloom or llama.
        layers, hidden, vocabulary: model shape; heads have 64 features, and Llama's share KV heads in pairs.
        seq_len, micro_batch_size, micro_batches: shape of the step; micro_batches is per data-parallel rank.
        layout: keys of parallel.*.
        precision: bf16 or fp32.
        threads: threads per rank.
    """

    like: str
    layers: int
    hidden: int
    vocabulary: int
    seq_len: int
    micro_batch_size: int
    micro_batches: int
    layout: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    threads: int = 1

    @property
    def name(self) -> str:
        """All fields in one line."""
        layout = " ".join(f"{key}={value}" for key, value in self.layout.items())
        return (
            f"{self.like} L{self.layers} h{self.hidden} V{self.vocabulary} S{self.seq_len} "
            f"b{self.micro_batch_size}x{self.micro_batches} {self.precision} {self.parallel.world_size}x{self.threads} "
            f"{layout}".rstrip()
        )

    @property
    def model(self) -> ModelConfig:
        """Model shape."""
        heads = max(2, self.hidden // 64)
        common: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_heads": heads,
            "vocab_size": self.vocabulary,
            "max_seq_len": self.seq_len,
        }
        if self.like == "bloom":
            return ModelConfig(**common)
        return ModelConfig(
            **common,
            num_kv_heads=heads // 2,
            ffn_size=-(-self.hidden * 8 // 3 // 64) * 64,
            position=Position.rope,
            norm=NormKind.rmsnorm,
            mlp=MLPKind.swiglu,
            embedding_norm=False,
            tie_embeddings=False,
        )

    @property
    def parallel(self) -> ParallelConfig:
        """Layout."""
        typed: dict[str, Any] = {key: _ENUMS[key](v) if key in _ENUMS else v for key, v in self.layout.items()}
        return ParallelConfig(**typed)

    @property
    def shape(self) -> Workload:
        """Shape of the step."""
        return Workload(
            self.seq_len, self.micro_batch_size, self.micro_batches, weight_bytes=2 if self.precision == "bf16" else 4
        )

    @property
    def machine(self) -> tuple[int, int, str]:
        """What must be calibrated for it: ranks, threads per rank, precision."""
        return self.parallel.world_size, self.threads, self.precision


def _rows() -> list[MeasuredRow]:
    row, fp32 = MeasuredRow, "fp32"
    one = [
        row("bloom", 4, 256, 2048, 256, 2, 2, threads=2),
        row("bloom", 8, 512, 32000, 512, 4, 1, threads=2),
        row("llama", 4, 512, 8192, 1024, 1, 2, threads=2),
        row("bloom", 2, 1024, 2048, 512, 2, 2, threads=2),
        row("llama", 12, 128, 512, 128, 8, 4, threads=2),
        row("llama", 6, 256, 32000, 2048, 1, 1, threads=2),
        row("bloom", 4, 512, 8192, 256, 4, 2, {"recompute": "full"}, threads=2),
        row("bloom", 4, 512, 8192, 1024, 1, 2, {"recompute": "selective"}, threads=2),
        row("bloom", 4, 512, 8192, 256, 4, 1, precision=fp32, threads=2),
        row("llama", 8, 256, 2048, 512, 2, 2, {"recompute": "full"}, precision=fp32, threads=2),
        row("bloom", 4, 256, 2048, 512, 2, 4),
        row("llama", 2, 512, 32000, 512, 2, 1),
        row("llama", 4, 256, 2048, 2048, 1, 1),
        row("bloom", 6, 128, 2048, 256, 4, 4),
        row("llama", 4, 256, 8192, 256, 4, 2, precision=fp32),
        row("bloom", 2, 512, 2048, 512, 2, 1, {"recompute": "full"}, precision=fp32),
    ]
    two = [
        row("bloom", 4, 512, 8192, 512, 2, 2, {"dp": 2, "zero_stage": 0}),
        row("bloom", 4, 512, 8192, 512, 2, 2, {"dp": 2}),
        row("llama", 4, 512, 8192, 512, 2, 2, {"dp": 2, "zero_stage": 2}),
        row("llama", 4, 512, 8192, 512, 2, 2, {"dp": 2, "zero_stage": 3}),
        row("llama", 6, 256, 2048, 256, 4, 4, {"dp": 2}),
        row("bloom", 4, 256, 2048, 512, 4, 1, {"dp": 2, "zero_stage": 3}),
        row("bloom", 4, 512, 8192, 512, 2, 2, {"tp": 2}),
        row("llama", 4, 512, 8192, 1024, 1, 2, {"tp": 2}),
        row("bloom", 4, 512, 8192, 512, 4, 1, {"tp": 2, "sequence_parallel": True}),
        row("llama", 6, 256, 2048, 512, 4, 2, {"tp": 2, "sequence_parallel": True}),
        row("bloom", 4, 512, 2048, 512, 4, 1, {"tp": 2, "sequence_parallel": True, "tp_chunks": 2}),
        row("llama", 4, 512, 8192, 1024, 2, 1, {"cp": 2}),
        row("bloom", 4, 256, 2048, 2048, 1, 2, {"cp": 2}),
        row("bloom", 8, 256, 2048, 512, 2, 8, {"pp": 2}),
        row("llama", 8, 512, 8192, 256, 2, 4, {"pp": 2}),
        row("bloom", 8, 256, 2048, 512, 2, 8, {"pp": 2, "schedule": "interleaved"}),
        row("llama", 8, 256, 2048, 512, 2, 4, {"pp": 2, "schedule": "zb_h1"}),
        row("bloom", 8, 512, 2048, 256, 2, 4, {"pp": 2, "schedule": "zb_v"}),
        row("bloom", 4, 256, 8192, 256, 4, 2, {"dp": 2}, precision=fp32),
        row("llama", 4, 256, 2048, 512, 2, 2, {"tp": 2}, precision=fp32),
        row("bloom", 8, 256, 2048, 256, 2, 4, {"pp": 2}, precision=fp32),
        row("llama", 8, 256, 2048, 256, 4, 2, {"pp": 2, "schedule": "interleaved", "recompute": "full"}),
    ]
    return one + two


ROWS = tuple(_rows())


def half_of(row: MeasuredRow) -> str:
    """Returns fit or judge, alternating."""
    return ("fit", "judge")[ROWS.index(row) % 2]


@dataclass(frozen=True)
class ComparedStep:
    """A row with its measured and predicted time.

    Attributes:
        row: what was trained.
        measured_s: median of its steps in the fastest round.
        planned: prediction from the calibration.
    """

    row: MeasuredRow
    measured_s: float
    planned: StepEstimate

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.planned.step_time_s / self.measured_s - 1


def machine_name(machine: tuple[int, int, str]) -> str:
    """Name of a calibration: 2x1 bf16 means two ranks of one thread."""
    ranks, threads, precision = machine
    return f"{ranks}x{threads} {precision}"


def compared_steps(stored: Mapping[str, Any]) -> list[ComparedStep]:
    """Returns the rows of a stored run with new predictions.

    Args:
        stored: with `machines`, device files by `machine_name`, and `steps`, seconds by the rows' names.
    """
    devices = {name: device_from(found, name) for name, found in stored["machines"].items()}
    return [
        ComparedStep(
            row,
            stored["steps"][row.name],
            StepModel(
                row.model, row.parallel, row.shape, devices[machine_name(row.machine)], execution=MEGADS
            ).estimate(),
        )
        for row in ROWS
        if row.name in stored["steps"]
    ]


def read_stored(path: Path = STORED) -> dict[str, Any]:
    """Reads the file of --write."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
