"""Arithmetic about a run before it starts: parameters, FLOPs, the memory of every rank, the time of a step;
the failures of its cluster, and what its compute is best spent on."""

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
