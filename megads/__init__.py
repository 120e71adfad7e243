"""megads: a Megatron-DeepSpeed style, Hydra-driven trainer for GPT/BLOOM-like language models.

The attributes below are the public API for notebooks and plugins. They are imported lazily, so that `import megads`
imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megads.batch import BatchInfo as BatchInfo
    from megads.errors import ConfigError as ConfigError
    from megads.model.attention import Attention as Attention
    from megads.model.config import ModelConfig as ModelConfig
    from megads.model.layers import Dropout as Dropout
    from megads.model.layers import Norm as Norm
    from megads.monitor.hooks import HookContext as HookContext
    from megads.monitor.trackers import RunDescription as RunDescription
    from megads.monitor.trackers import Tracker as Tracker
    from megads.optim.masters import Update as Update
    from megads.parallel.partition import Cut as Cut
    from megads.parallel.partition import ParallelStyle as ParallelStyle
    from megads.parallel.partition import ShardingTable as ShardingTable
    from megads.runtime.hooks import Hook as Hook
    from megads.runtime.hooks import StepInfo as StepInfo
    from megads.runtime.hooks import TrainState as TrainState
    from megads.runtime.registry import register_hook as register_hook
    from megads.runtime.registry import register_model as register_model
    from megads.runtime.registry import register_optimizer as register_optimizer
    from megads.runtime.registry import register_reader as register_reader
    from megads.runtime.registry import register_schedule as register_schedule
    from megads.runtime.registry import register_tracker as register_tracker
    from megads.tools.notebook import LoadedModel as LoadedModel
    from megads.tools.notebook import load_model as load_model
    from megads.tools.notebook import read_config as read_config
    from megads.tools.notebook import read_data as read_data
    from megads.tools.notebook import read_events as read_events
    from megads.tools.notebook import read_metrics as read_metrics

_HOMES = {
    "megads.batch": ("BatchInfo",),
    "megads.errors": ("ConfigError",),
    "megads.model.attention": ("Attention",),
    "megads.model.config": ("ModelConfig",),
    "megads.model.layers": ("Dropout", "Norm"),
    "megads.monitor.hooks": ("HookContext",),
    "megads.monitor.trackers": (
        "RunDescription",
        "Tracker",
    ),
    "megads.optim.masters": ("Update",),
    "megads.parallel.partition": (
        "Cut",
        "ParallelStyle",
        "ShardingTable",
    ),
    "megads.runtime.hooks": (
        "Hook",
        "StepInfo",
        "TrainState",
    ),
    "megads.runtime.registry": (
        "register_hook",
        "register_model",
        "register_optimizer",
        "register_reader",
        "register_schedule",
        "register_tracker",
    ),
    "megads.tools.notebook": (
        "LoadedModel",
        "load_model",
        "read_config",
        "read_data",
        "read_events",
        "read_metrics",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 (all are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'megads' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
