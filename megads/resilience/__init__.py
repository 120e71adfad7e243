"""Fault tolerance: non-finite steps, loss spikes, silent data corruption, and failed ranks or nodes.

`config` holds the settings, `hooks` monitors the steps of a run, `spikes` detects loss spikes, `rollbacks` reads
recorded rollbacks, `silent_corruption` detects flipped bits and wrong results, and `restarts` decides what follows a
failed attempt.
"""

__all__ = ["config", "hooks", "restarts", "rollbacks", "silent_corruption", "spikes"]
