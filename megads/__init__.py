"""megads: a Megatron-DeepSpeed style, Hydra-driven trainer for GPT/BLOOM-like language models.

The names of `megads.api`, and those with which a notebook reads a run, are attributes of this package. They are
imported when they are used, so that `import megads` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megads.api import *  # noqa: F403
    from megads.tools.notebook import LoadedModel as LoadedModel
    from megads.tools.notebook import load_model as load_model
    from megads.tools.notebook import read_config as read_config
    from megads.tools.notebook import read_data as read_data
    from megads.tools.notebook import read_events as read_events
    from megads.tools.notebook import read_metrics as read_metrics

_NOTEBOOK = ("LoadedModel", "load_model", "read_config", "read_data", "read_events", "read_metrics")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    home = importlib.import_module("megads.tools.notebook" if name in _NOTEBOOK else "megads.api")
    if name not in _NOTEBOOK and name not in dir(home):
        raise AttributeError(f"module 'megads' has no attribute {name!r}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_NOTEBOOK, *dir(importlib.import_module("megads.api"))])
