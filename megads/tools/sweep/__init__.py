"""Sweeps: which points of a search space are trained, where, when they are cut short, and what came of them.

The room starts `megads train` commands and reads their run directories; it composes no config (cli/ does) and trains
nothing itself. `points.jsonl` of the sweep's folder is the truth: whatever dies, the same command goes on from it.
"""
