"""Planning a run before it starts: memory of every rank, step time, goodput under failures of the cluster, and
compute-optimal model size."""

__all__ = [
    "collectives",
    "devices",
    "layout_search",
    "life",
    "memory",
    "operators",
    "scaling_laws",
    "step_estimate",
    "step_time",
]
