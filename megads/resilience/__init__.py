"""What a run does about faults: non-finite steps, loss spikes, and ranks or nodes that failed.

`config` holds the settings, `hooks` watches the steps of a run, `spikes` finds loss spikes, `rollbacks` says what a
rollback decided, `replicas` finds flipped bits, `compute` wrong values, and `restarts` what follows a start of the
ranks that failed.
"""

__all__ = ["compute", "config", "hooks", "replicas", "restarts", "rollbacks", "spikes"]
