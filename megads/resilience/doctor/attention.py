"""Which kinds of attention there are on this machine."""

from __future__ import annotations

from megads.model.attention_kinds import AttentionKind, AttentionWork, why_not
from megads.ops.config import Implementation
from megads.resilience.doctor.finding import Finding, ok

_USUAL_HEAD_DIM = 64


def describe_attention(cuda: bool) -> Finding:
    """Says what model.attention may be here for ALiBi in bf16, and why not the others.

    Whether the kernels are compiled is another finding; whether one suits a model, its run says.

    Args:
        cuda: there is a GPU to train on.
    """
    work = AttentionWork(
        head_dim=_USUAL_HEAD_DIM, heads=1, kv_heads=1, alibi=True, bf16=True, cuda=cuda, impl=Implementation.fused
    )
    reasons = {kind: why_not(kind, work) for kind in AttentionKind if kind is not AttentionKind.auto}
    there = ", ".join(kind for kind, reason in reasons.items() if not reason)
    # Of "is for GPUs (cuDNN), but this run is on a CPU: use ..." what is true of the machine.
    others = [f"{kind} {reason.split(': ')[0].split(', but')[0]}" for kind, reason in reasons.items() if reason]
    return ok("attention", "; ".join([there, *others]))
