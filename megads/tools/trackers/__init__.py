"""wandb, TensorBoard, MLflow and trackers of plugins (keys of logging): they follow the run's files.

The launcher starts `process` beside the ranks, which starts a process per tracker: `wandb_tracker`,
`tensorboard_tracker`, `mlflow_tracker`, or a plugin's. `feed` reads what is new. Their interface is in
`megads.monitor.trackers`.
"""

__all__ = ["feed"]
