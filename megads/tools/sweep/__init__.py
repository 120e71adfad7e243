"""Hyperparameter sweeps, `megads train -m`: search, launchers, pruning and results.

`driver` starts `megads train` commands and reads their run directories. It composes no config (cli/ does) and does not
train. The state of a sweep is `points.jsonl` in its folder: after any failure, the same command resumes from it.
"""

__all__ = ["config", "driver", "launchers", "page", "points", "results"]
