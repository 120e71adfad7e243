"""Arithmetic about a run before it starts: parameters, FLOPs, the memory of every rank, the time of a step."""

__all__ = [
    "collectives",
    "devices",
    "layout_search",
    "memory",
    "model_size",
    "operators",
    "peak",
    "step_estimate",
    "step_time",
]
