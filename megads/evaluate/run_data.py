"""Which data a run was trained on, for those who come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megads.runtime.run_dir import CONFIG_FILE, recorded_config


def dataset_prefixes(run_dir: Path) -> list[Path]:
    """Places where the training data of a run may be, from its frozen config; none where that is not there.

    Paths there are relative to where the run was started: that is here, or the folder that holds runs/.
    """
    try:
        content = yaml.safe_load(recorded_config(run_dir / CONFIG_FILE))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return []
    # Not load_frozen: a run of an earlier version, whose config lacks today's keys, can still be read.
    data = content.get("data") if isinstance(content, dict) else None
    datasets: Any = data.get("train") if isinstance(data, dict) else None
    items = datasets if isinstance(datasets, list) else []
    paths = [Path(str(item["path"])) for item in items if isinstance(item, dict) and "path" in item]
    return [base / path for path in paths for base in (Path(), run_dir.parent.parent)]
