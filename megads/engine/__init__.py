"""Training engines: model stages, grid, pipeline schedule and optimizer. The only package that imports DeepSpeed.

`build_train_engine` builds the engine of a layout, whose API is in `interface`: for ZeRO-0 and 1 with a pipeline
`native_engine` or `deepspeed_engine`, for ZeRO-2 and 3 `zero_engine`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megads.parallel.config import GRADIENT_STAGES, EngineKind

if TYPE_CHECKING:
    from megads.engine.interface import EngineSpec, TrainEngine

__all__ = [
    "build_train_engine",
    "deepspeed_adapter",
    "deepspeed_options",
    "deepspeed_private",
    "interface",
    "scoring_engine",
    "unsupported",
]


_ENGINES = {
    EngineKind.native: "native_engine.NativeEngine",
    EngineKind.deepspeed: "deepspeed_engine.DeepSpeedEngine",
}
_ZERO_ENGINE = "zero_engine.ZeroEngine"
"""The engine for ZeRO-2 and 3."""


def build_train_engine(spec: EngineSpec) -> TrainEngine:
    """Builds the engine of a layout, with its initial weights; collective over the world.

    Args:
        spec: model, layout and device of the engine.

    Raises:
        ConfigError: the model cannot be partitioned this way, or DeepSpeed is too old.
    """
    sharded = spec.parallel.zero_stage in GRADIENT_STAGES
    # Imported by its name: a run loads no engine but its own, and the launcher, which imports this package, neither
    # torch nor DeepSpeed.
    module, name = (_ZERO_ENGINE if sharded else _ENGINES[spec.engine]).split(".")
    engine: TrainEngine = getattr(import_module(f"{__name__}.{module}"), name)(spec)
    return engine
