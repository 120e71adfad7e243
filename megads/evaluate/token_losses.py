"""The loss of every token of given samples, with the weights of a checkpoint, on one process.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megads.batch import MicroBatch
from megads.model.gpt import GPT, token_losses


def losses_of(model: GPT, batches: Iterable[MicroBatch], device: torch.device) -> Sequence[npt.NDArray[np.float32]]:
    """Computes the losses of the tokens of micro-batches; dropout is off.

    Args:
        model: in evaluation mode.
        batches: with tokens.
        device: the model's.

    Returns:
        fp32 [s] for each sample in order: nats of the label at each place, masked ones included.
    """
    found: list[npt.NDArray[np.float32]] = []
    with torch.inference_mode():
        for batch in batches:
            assert batch.tokens_bs is not None and batch.labels_bs is not None
            logits = model(batch.tokens_bs.to(device), batch.info.to(device))
            found += list(token_losses(logits, batch.labels_bs.to(device)).float().cpu().numpy())
    return found
