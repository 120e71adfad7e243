"""Tensor, sequence, context and pipeline parallelism on torch.distributed, independent of the model.

`rank_order` maps ranks to coordinates and `grid` creates the process groups. `sharding` applies tensor and sequence
parallelism to a stage, `context` context parallelism to samples, and `partition` splits the model into pipeline stages,
which run a `schedule`. `loss` is vocabulary-parallel cross entropy, `norm` RMSNorm over sharded features.
"""

__all__ = [
    "compute_trace",
    "config",
    "context",
    "grid",
    "loss",
    "norm",
    "partition",
    "pipeline_actions",
    "rank_order",
    "schedule",
    "schedule_simulation",
    "sharding",
    "token_scores",
    "weight_gradients",
]
