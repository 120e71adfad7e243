"""All ranks of a run compute attention in the same way: rank 0 chooses."""

from __future__ import annotations

from pathlib import Path

import torch

from megads.model.attention_choice import AttentionChoice, choose_attention
from megads.model.attention_kinds import AttentionWork
from megads.model.config import ModelConfig
from megads.parallel.context import held_places
from megads.parallel.grid import ParallelGrid
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE

EVENT = "attention"


def settle_attention(
    model: ModelConfig, work: AttentionWork, grid: ParallelGrid, device: torch.device, run_dir: Path
) -> AttentionChoice:
    """How this run computes attention, see `choose_attention`; collective over the world.

    Args:
        model: the model.
        work: what a rank computes of it.
        grid: the ranks.
        device: this rank's.
        run_dir: the run's folder, where a choice of an earlier start is.

    Raises:
        ConfigError: on every rank: what was asked for does not run, or nothing does.
    """

    def choose() -> AttentionChoice:
        places_s = None
        if grid.cp.size > 1 and work.seq_len is not None:
            places_s = held_places(work.seq_len, grid.cp.rank, grid.cp.size, device)
        return choose_attention(
            model, work, device, places_s=places_s, earlier=lambda key: earlier_choice(run_dir, key)
        )

    return grid.control.first_decides(choose)


def record_attention(events: EventWriter, choice: AttentionChoice) -> None:
    """Writes the choice into the run's events, if there was one to make."""
    if choice.outcomes:
        events.write(EVENT, message=choice.text, **choice.to_dict())


def earlier_choice(run_dir: Path, key: str) -> AttentionChoice | None:
    """What the last start of a run that chose under this key has taken; None: there was none."""
    found = [event for event in read_json_lines(run_dir / EVENTS_FILE) if event.get("event") == EVENT]
    same = [event for event in found if event.get("key") == key]
    return AttentionChoice.from_dict(same[-1]) if same else None
