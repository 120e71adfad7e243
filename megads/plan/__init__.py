"""Planning a run before it starts: parameter count, FLOPs, memory of every rank, step time, goodput under failures of
the cluster, and compute-optimal model size."""

__all__ = [
    "collectives",
    "devices",
    "layout_search",
    "life",
    "memory",
    "model_size",
    "operators",
    "peak",
    "step_estimate",
    "step_time",
]
