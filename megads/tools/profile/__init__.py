"""What runs in a step and for how long: timelines (logging.timeline_every_steps), traces of torch.profiler and
snapshots of GPU memory (logging.profile_steps, memory_snapshot), and stragglers.

`megads.train.setup` adds the hooks of `timeline`, `torch_profiler` and `stragglers` to a run.
"""

__all__ = ["operators", "trace_events"]
