"""Infrastructure of every process of a run, independent of model and training.

Environment variables, files and the run directory, the lease and the secret of a start, SLURM, process groups and the
control plane, heartbeats, stop requests, metrics, events and spans, the hook protocol, plugin registries, and terminal
output.
"""

__all__ = [
    "cgroups",
    "claims",
    "config",
    "control_store",
    "distributed",
    "environment",
    "files",
    "heartbeat",
    "hooks",
    "lease",
    "machine_memory",
    "metrics",
    "optional_tools",
    "own_folder",
    "platform",
    "ports",
    "process",
    "progress",
    "registry",
    "rich_console",
    "run_dir",
    "slurm",
    "stop",
    "terminal_text",
    "url",
]
