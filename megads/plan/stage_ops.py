"""The operations of a pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megads.model.gpt import EMBEDDING, HEAD
from megads.parallel.config import Recompute
from megads.plan.activations import (
    block_ops,
    document_mask_ops,
    embedding_ops,
    final_norm_ops,
    head_ops,
    received_ops,
    sent_ops,
)
from megads.plan.micro_batch import Pass
from megads.plan.tape import Op


def stage_ops(
    one_pass: Pass, layers: Sequence[str], recompute: Mapping[str, Recompute], *, first: bool, last: bool
) -> list[Op]:
    """The operations of a pipeline stage, in order.

    Args:
        one_pass: the micro-batch.
        layers: names of the model's stages it holds.
        recompute: what each of the blocks among them recomputes.
        first: it reads tokens instead of receiving activations.
        last: it computes the loss instead of sending activations.
    """
    first_block = next((layer for layer in layers if layer.startswith("blocks.")), None)
    ops: list[Op] = [] if first else received_ops(one_pass)
    for layer in layers:
        if layer == EMBEDDING:
            ops += embedding_ops(one_pass)
        elif layer == HEAD:
            ops += head_ops(one_pass)
        elif layer == "final_norm":
            ops += final_norm_ops(one_pass)
        else:
            ops += document_mask_ops(one_pass) if layer == first_block else []
            ops += block_ops(one_pass, recompute[layer])
    if not last:
        ops += sent_ops(one_pass)
    return ops
