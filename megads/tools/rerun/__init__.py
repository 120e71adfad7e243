"""Detection of silent data corruption (resilience.check_*, resilience.rerun_nonfinite).

`silent_corruption` has the hooks, which `megads.resilience.hooks` adds to a run: they compare replicas of the state and
results of a step, and name the rank at fault. `repeated_step` computes a step several times.
"""

__all__: list[str] = []
