"""Monitoring of a run: it observes and never controls.

`hooks` writes step metrics and layer norms, and creates plugin hooks. `experts` records the load of experts.
`accounting` computes goodput, MTTD and MTTR. `console` shows the run's metrics and events in the launcher's terminal,
with the remaining time (`eta`). `trackers` is the interface of wandb, TensorBoard and trackers of plugins. `run_state`
tells whether a run trains, how it ended, or that it is gone.
"""

__all__ = [
    "accounting",
    "console",
    "eta",
    "experts",
    "hooks",
    "run_state",
    "trackers",
]
