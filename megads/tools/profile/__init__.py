"""What the times of a step's actions show: timelines (logging.timeline_every_steps) and stragglers.

`megads.train.setup` adds the hooks of `timeline` and `stragglers` to a run.
"""

__all__: list[str] = []
