"""Arithmetic about a run before it starts: parameters, FLOPs, the memory of every rank, the time of a step."""

__all__ = ["memory", "model_size", "peak", "step_time"]
