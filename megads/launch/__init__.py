"""Starts a run and keeps it alive.

`preflight` decides what can be decided before a rank starts, as one `ResolvedRun`; `initial_weights` what other run it
starts from. `acceptance` accepts or refuses it
as a start of its run, and writes the records of an accepted one. `start` has `launcher` start and watch the ranks, on
this machine (`node_ranks`, `rank_server`) or on SLURM (`slurm_ranks`, `node_agent`, `scheduler`), again after a fault.
`hang_detection` finds ranks that hang, `evidence` says what they did. `uploads`
keeps a second copy of checkpoints elsewhere, and brings it back. `rank`, `rank_server`, `node_agent`, `tracker`,
`uploader` and `node_checker` are also processes of their own, run with `python -m`.
"""

__all__ = [
    "disk_need",
    "dry_run_warnings",
    "evidence",
    "initial_weights",
    "launcher",
    "node_check",
    "preflight",
    "preflight_memory",
    "rank",
    "slurm_ranks",
    "start",
    "step_plan",
    "uploader",
]
