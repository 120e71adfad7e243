"""Training engines: model stages, grid, pipeline schedule and optimizer. The only package that imports DeepSpeed.

`build_train_engine` builds the engine of a layout, whose API is in `interface`: ZeRO-0 and 1 with a pipeline
(`native_engine`), or ZeRO-2 and 3 (`zero_engine`). `autotune` selects the fastest kernels on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megads.parallel.config import GRADIENT_STAGES, EngineKind

if TYPE_CHECKING:
    from megads.engine.interface import EngineSpec, TrainEngine

__all__ = [
    "autotune",
    "build_train_engine",
    "deepspeed_adapter",
    "deepspeed_options",
    "deepspeed_private",
    "interface",
    "operator_trials",
    "scoring_engine",
    "stragglers",
    "timeline",
    "unsupported",
]


def build_train_engine(spec: EngineSpec) -> TrainEngine:
    """Builds the engine of a layout, with its initial weights; collective over the world.

    Args:
        spec: model, layout and device of the engine.

    Raises:
        ConfigError: the model cannot be partitioned this way, or DeepSpeed is too old.
    """
    # Imported here, as the launcher imports `deepspeed_options` and must not wait for torch and DeepSpeed.
    if spec.parallel.zero_stage in GRADIENT_STAGES:
        from megads.engine.zero_engine import ZeroEngine

        return ZeroEngine(spec)
    if spec.engine is EngineKind.deepspeed:
        from megads.engine.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(spec)
    from megads.engine.native_engine import NativeEngine

    return NativeEngine(spec)
