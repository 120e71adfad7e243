"""`megads plan` and the dry run of `megads train`: memory of every rank, layout, schedule, step time, goodput under
failures of the cluster, and compute-optimal model size."""

__all__ = [
    "budget",
    "config",
    "devices",
    "dry_run",
    "life_output",
    "output",
    "run_plan",
    "step_estimate",
    "step_time",
]
