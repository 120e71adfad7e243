"""wandb, TensorBoard and trackers of plugins (logging.wandb, tensorboard, trackers): they follow the run's files.

The launcher starts `process` beside the ranks, which starts a process per tracker: `wandb_tracker`,
`tensorboard_tracker`, or a plugin's. `feed` reads what is new. Their interface is in `megads.monitor.trackers`.
"""

__all__ = ["feed"]
