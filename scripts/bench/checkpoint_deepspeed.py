"""DeepSpeed's checkpoints, for benchmark 9: its engine with ZeRO-1, a state of the same size, its own training steps.

Its checkpoint engines differ in the writer: torch.save; DeepSpeed's writer, here the Python one (the one with
asynchronous I/O needs a GPU's pinned memory); and, decoupled, that writer in a separate process, which every optimizer
step waits for until the checkpoint is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from megads.batch import MicroBatch
from megads.engine.deepspeed_adapter import prepare_deepspeed
from megads.model.gpt import GPT
from megads.runtime.environment import child_environment
from tests.parity import Scenario

# data_parallel: without it DeepSpeed 0.19.8 uses a rank that it has not set.
_WRITER = {"type": "python", "data_parallel": "replica"}
WRITERS: dict[str, dict[str, Any] | None] = {
    "DeepSpeed": None,
    "DeepSpeed, its writer": _WRITER,
    "DeepSpeed, decoupled": {**_WRITER, "decoupled": True},
}
"""DeepSpeed's section checkpoint.writer of each side."""
_ONE_MACHINE = {"CROSS_RANK": "0", "CROSS_SIZE": "1"}


class DeepSpeedPeer:
    """A DeepSpeed engine with the benchmark's model.

    Args:
        scenario: defines model and precision.
        writer: DeepSpeed's section checkpoint.writer; None saves with torch.save.
        folder: folder of its checkpoints.
    """

    def __init__(self, scenario: Scenario, writer: dict[str, Any] | None, folder: Path) -> None:
        prepare_deepspeed()
        model = GPT(scenario.model, scenario.seed).to(scenario.dtype)
        config: dict[str, Any] = {
            "train_batch_size": scenario.global_batch_size,
            "train_micro_batch_size_per_gpu": scenario.micro_batch_size,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        if writer is not None:
            config["checkpoint"] = {"writer": writer}
        optimizer = torch.optim.AdamW(model.parameters(), lr=scenario.lr, fused=True)
        with child_environment(_ONE_MACHINE), _quiet():
            self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self._folder = folder

    def step(self, batches: Sequence[MicroBatch]) -> None:
        """Runs an optimizer step; a decoupled checkpoint is committed before it changes the weights."""
        (batch,) = batches
        with _quiet():
            logits_bsv = self._engine(batch.tokens_bs, batch.info)
            labels_bs = batch.labels_bs
            assert labels_bs is not None
            self._engine.backward(nn.functional.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten()))
            self._engine.step()

    def save(self, number: int) -> None:
        """Saves a checkpoint, as far as the training loop waits for it."""
        # Without no_grad its fp32 partitions are not leaves, and torch refuses to pass them to another process.
        with torch.no_grad(), _quiet():
            self._engine.save_checkpoint(str(self._folder), tag=str(number))

    def close(self) -> None:
        """Terminates its writer process, if there is one."""
        with _quiet():
            getattr(self._engine.checkpoint_engine, "cleanup", lambda: None)()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the output and warnings of DeepSpeed."""
    with Path(os.devnull).open("w") as nothing:
        before = sys.stdout
        sys.stdout = nothing
        try:
            yield
        finally:
            sys.stdout = before
