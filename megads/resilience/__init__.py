"""Fault tolerance: non-finite steps, loss spikes, and failed ranks or nodes.

`config` holds the settings, `hooks` monitors the steps of a run, `spikes` detects loss spikes, `rollbacks` reads
recorded rollbacks, and `restarts` decides what follows a failed attempt. `megads.tools.rerun` detects silent data
corruption.
"""

__all__ = ["config", "hooks", "restarts", "rollbacks", "spikes"]
