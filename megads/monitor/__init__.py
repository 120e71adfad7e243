"""Observes a run and never steers it.

`hooks` writes the step line of metrics.jsonl and norms of layers, and runs the hooks of plugins. `accounting` says
where a run's time went. `console` and `live_console` show the run's files in the launcher's terminal. `trackers` feeds
them to wandb and TensorBoard (`tracker_backends`), and to plugins'.
"""

__all__ = ["accounting", "console", "hooks", "live_console", "tracker_backends", "trackers"]
