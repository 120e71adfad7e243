"""Fault tolerance: non-finite steps, loss spikes, silent data corruption, and failed ranks or nodes.

`config` holds the settings, `hooks` monitors the steps of a run, `spikes` detects loss spikes, `rollbacks` reads
recorded rollbacks, `replicas` detects flipped bits, `compute` detects wrong results, and `restarts` decides what
follows a failed attempt.
"""

__all__ = ["compute", "config", "hooks", "replicas", "restarts", "rollbacks", "spikes"]
