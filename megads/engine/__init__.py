"""Trains: joins the model's stages, the grid, the schedule and the optimizer; the only room that imports DeepSpeed.

`build_train_engine` makes the engine of a layout, which `interface` describes: ZeRO-0 and 1 with a pipeline
(`pipeline_engine`), or ZeRO-2 and 3 (`zero_engine`). `autotune` measures what computes fastest on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megads.parallel.config import GRADIENT_STAGES

if TYPE_CHECKING:
    from megads.engine.interface import EngineSpec, TrainEngine

__all__ = [
    "autotune",
    "build_train_engine",
    "deepspeed_adapter",
    "deepspeed_options",
    "interface",
    "operator_trials",
    "scoring_engine",
    "stragglers",
    "timeline",
]


def build_train_engine(spec: EngineSpec) -> TrainEngine:
    """Builds the engine of a layout, with its initial weights; collective over the world.

    Args:
        spec: what it is built from.

    Raises:
        ConfigError: the model cannot be cut this way, or DeepSpeed is too old.
    """
    # Here, as the launcher reads `deepspeed_options` and must not wait for torch and DeepSpeed.
    if spec.parallel.zero_stage in GRADIENT_STAGES:
        from megads.engine.zero_engine import ZeroTrainEngine

        return ZeroTrainEngine(spec)
    from megads.engine.pipeline_engine import PipelineTrainEngine

    return PipelineTrainEngine(spec)
