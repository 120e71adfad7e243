"""Planning a run before it starts: parameter count, FLOPs, memory of every rank, step time, goodput under failures of
the cluster, and compute-optimal model size."""

__all__ = [
    "checkpoint_interval",
    "collectives",
    "devices",
    "failures",
    "layout_search",
    "life",
    "measured_rates",
    "memory",
    "model_size",
    "operators",
    "peak",
    "scaling_law",
    "step_estimate",
    "step_time",
]
