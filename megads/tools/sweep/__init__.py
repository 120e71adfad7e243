"""Sweeps, `megads train -m`: which points are trained, where, when they are cut short, and what came of them.

`driver` starts `megads train` commands and reads their run directories; it composes no config (cli/ does) and trains
nothing itself. `points.jsonl` of the sweep's folder is the truth: whatever dies, the same command goes on from it.
"""

__all__ = ["config", "driver", "launchers", "page", "points", "results"]
