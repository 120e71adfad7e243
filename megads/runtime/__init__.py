"""Infrastructure of every process of a run, independent of model and training.

Environment variables, files and the run directory, the lease and the secret of a start, SLURM, process groups and the
control plane, heartbeats, stop requests, metrics, events and spans, the hook protocol, plugin registries, and terminal
output.
"""

__all__ = [
    "claims",
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
    "progress",
    "rank_evidence",
    "registry",
    "run_dir",
    "run_secret",
    "slurm",
    "span",
    "stop",
    "terminal_region",
    "terminal_text",
    "url",
    "visible_console",
]
