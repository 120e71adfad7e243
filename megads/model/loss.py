"""The loss head on one process."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def token_losses(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Cross entropy of every token in nats, fp32 (fp64 for fp64 logits) [b, s]."""
    logits = logits_bsv if logits_bsv.dtype.itemsize >= 4 else logits_bsv.float()
    return F.cross_entropy(logits.flatten(0, 1), labels_bs.flatten(), reduction="none").view_as(labels_bs)
