"""megads: a Megatron-DeepSpeed style, Hydra-driven trainer for GPT/BLOOM-like language models.

The names of `megads.api`, and those with which a notebook starts and reads a run, are attributes of this package. They
are imported when they are used, so that `import megads` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megads.api import *  # noqa: F403
    from megads.cli.notebook import train as train
    from megads.tools.notebook import LoadedModel as LoadedModel
    from megads.tools.notebook import MetricsTable as MetricsTable
    from megads.tools.notebook import RunFailed as RunFailed
    from megads.tools.notebook import RunHandle as RunHandle
    from megads.tools.notebook import load_model as load_model
    from megads.tools.notebook import read_config as read_config
    from megads.tools.notebook import read_data as read_data
    from megads.tools.notebook import read_events as read_events
    from megads.tools.notebook import read_metrics as read_metrics

_NOTEBOOK = (
    *("LoadedModel", "MetricsTable", "RunFailed", "RunHandle"),
    *("load_model", "read_config", "read_data", "read_events", "read_metrics"),
)


class _TrainPackage(types.ModuleType):
    """The package megads.train, which is the function `megads.train(...)` too.

    Importing one of its modules makes the package an attribute of megads, whatever was there before.
    """

    def __call__(self, *config: Any) -> Any:
        """Starts or continues a run, see `megads.cli.notebook.train`.

        Args:
            config: overrides such as "experiment=first", or mappings such as {"train.steps": 20}.
        """
        return importlib.import_module("megads.cli.notebook").train(*config)


importlib.import_module("megads.train").__class__ = _TrainPackage


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    home = importlib.import_module("megads.tools.notebook" if name in _NOTEBOOK else "megads.api")
    if name not in _NOTEBOOK and name not in dir(home):
        raise AttributeError(f"module 'megads' has no attribute {name!r}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(["__version__", "train", *_NOTEBOOK, *dir(importlib.import_module("megads.api"))])
