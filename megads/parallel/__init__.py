"""Tensor, sequence, context and pipeline parallelism on torch.distributed, independent of the model.

`config` maps ranks to coordinates and `grid` creates the process groups. `sharding` applies tensor and sequence
parallelism to a stage, `experts` expert parallelism, `context` context parallelism to samples, and `partition` splits
the model into pipeline stages, which run a `schedule`. `loss` is vocabulary-parallel cross entropy, and `chunked_mlp`
computes MLPs in chunks of the sequence.
"""

__all__ = [
    "chunked_mlp",
    "config",
    "context",
    "experts",
    "float8_linear",
    "grid",
    "grouped_linear",
    "loss",
    "message_order",
    "partition",
    "pipeline_actions",
    "ring_shifts",
    "schedule",
    "schedule_simulation",
    "sharding",
    "token_scores",
    "weight_gradients",
]
