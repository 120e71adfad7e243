"""Monitoring of a run: it observes and never controls.

`hooks` writes step metrics and layer norms, and creates plugin hooks. `accounting` computes goodput, MTTD and MTTR.
`console` and `live_console` show the run's metrics and events in the launcher's terminal, with the remaining time
(`eta`). `trackers` passes them on to wandb and TensorBoard (`wandb_tracker`, `tensorboard_tracker`) and to trackers of
plugins. `run_state` tells whether a run trains, how it ended, or that it is gone.
"""

__all__ = [
    "accounting",
    "console",
    "eta",
    "hooks",
    "live_console",
    "run_state",
    "tensorboard_tracker",
    "trackers",
    "wandb_tracker",
]
