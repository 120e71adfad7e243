"""How the model is split over ranks, in pure torch.distributed; knows no model.

`rank_order` says which rank stands where, `grid` makes the process groups. `sharding` cuts a stage by tensor and
sequence parallelism, `context` cuts samples, `partition` cuts the model into pipeline stages, which run a `schedule`.
`loss` is the cross entropy over a cut vocabulary, `norm` RMSNorm over cut features.
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
