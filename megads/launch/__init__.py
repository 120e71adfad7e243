"""Starts a run and supervises its ranks until it ends.

`preflight` resolves what can be decided before a rank starts into one `ResolvedRun`, `layout` what the config leaves
to the machine; `initial_weights` finds the weights that a new run starts from. `acceptance` accepts or refuses the
start, and writes the records of an accepted one. `start` and `attempts` use `launcher` to start and monitor the ranks,
on this machine (`node_ranks`, `rank_server`), on SLURM (`slurm_ranks`, `node_agent`, `scheduler`) or as the processes
of a platform (`external_ranks`), and restart them after a failure. `hang_detection` finds ranks that hang; `evidence`
collects what they were doing. `object_storage` and `raw_text` are what a start asks of the tools that keep a copy of
the checkpoints in a remote store and make datasets of text. `rank`, `rank_server` and `node_agent` also run as separate
processes, with `python -m`.
"""

__all__ = [
    "evidence",
    "initial_weights",
    "launcher",
    "layout",
    "object_storage",
    "preflight",
    "rank",
    "run_length",
    "scheduler",
    "slurm_ranks",
    "start",
]
