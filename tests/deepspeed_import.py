"""Imports DeepSpeed as where MLflow is not installed.

DeepSpeed's autotuner, which megads does not use, imports MLflow if it can: four seconds of processor time in every
process that imports DeepSpeed, and more memory to fork.
"""

from __future__ import annotations

import importlib
import sys

_found = sys.modules.get("mlflow")
# An import of a module whose entry is None raises ImportError.
sys.modules["mlflow"] = None  # type: ignore[assignment]
try:
    importlib.import_module("deepspeed")
finally:
    del sys.modules["mlflow"]
    if _found is not None:
        sys.modules["mlflow"] = _found
