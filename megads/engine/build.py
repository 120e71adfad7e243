"""Which engine trains a layout."""

from __future__ import annotations

from megads.engine.interface import EngineSpec, TrainEngine
from megads.engine.pipeline_engine import PipelineTrainEngine
from megads.engine.zero_engine import ZeroTrainEngine
from megads.parallel.config import GRADIENT_STAGES


def build_train_engine(spec: EngineSpec) -> TrainEngine:
    """The engine of a layout, with its initial weights; collective over the world.

    Args:
        spec: what it is built from.

    Raises:
        ConfigError: the model cannot be cut this way, or DeepSpeed is too old.
    """
    return (ZeroTrainEngine if spec.parallel.zero_stage in GRADIENT_STAGES else PipelineTrainEngine)(spec)
