"""What every process of a run stands on, whatever it computes.

Environment variables, files and the run directory, the lease and the secret of a start, SLURM, process groups and the
control plane, heartbeats, requests to stop, metrics and events, the hook protocol, and the registries of plugins.
"""

__all__ = [
    "config",
    "control_store",
    "distributed",
    "environment",
    "files",
    "heartbeat",
    "hooks",
    "lease",
    "listener",
    "machine_memory",
    "metrics",
    "process",
    "registry",
    "run_dir",
    "run_secret",
    "slurm",
    "stop",
    "terminal_text",
    "visible_console",
]
