"""How a run ended, as a few names and values for the trackers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def final_table(
    step: Mapping[str, Any], validation: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> dict[str, int | float]:
    """Returns the table's rows; those of which nothing is known are left out.

    Args:
        step: the last step's line of metrics.jsonl.
        validation: the last validation's line.
        events: all lines of events.jsonl.
    """
    counts = Counter(event.get("event") for event in events)
    rows: dict[str, int | float | None] = {
        "steps": step.get("step"),
        "samples": step.get("samples"),
        "tokens": step.get("tokens"),
        "loss": step.get("loss"),
    }
    rows |= {key: value for key, value in validation.items() if key.startswith("valid/")}
    rows |= {
        "tokens_per_s": step.get("tokens_per_s"),
        "mfu": step.get("mfu"),
        "peak_memory_bytes": step.get("peak_memory_bytes"),
        "skipped_steps": counts["step_skipped"],
        "checkpoints": counts["checkpoint_saved"],
        "starts": counts["start"],
        "wall_s": _last_wall_s(events),
        "exit_code": next((event.get("exit_code") for event in reversed(events) if event.get("event") == "exit"), None),
    }
    return {name: value for name, value in rows.items() if value is not None}


def _last_wall_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from the last launch to the last event."""
    launches = [event["time"] for event in events if event.get("event") == "launch"]
    return events[-1]["time"] - launches[-1] if launches else None
