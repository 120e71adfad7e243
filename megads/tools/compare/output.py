"""A comparison as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megads.tools.compare.comparison import Comparison

_HEADER = f"{'quantity':<24}{'steps':>6}{'largest':>10}{'at step':>9}{'allowed':>10}{'outside from':>14}"
_MOST_KEYS = 20
"""Number of config keys that the text lists; JSON has all."""


def as_text(found: Comparison) -> str:
    """The comparison for a terminal: what was compared, the largest relative differences, and what may explain them."""
    first, last = found.steps[0], found.steps[-1]
    lines = [
        f"run:       {found.run}",
        f"reference: {found.reference}" + (f", {found.machine}" if found.machine else ""),
        f"compared:  {len(found.steps):,} steps, {first:.0f} to {last:.0f}, of the reference's {found.planned:,}",
        "",
        _HEADER,
    ]
    for item in found.quantities:
        left = f"step {item.left.step}" if item.left is not None else "-"
        lines.append(
            f"{item.name:<24}{item.count:>6}{item.largest:>10.2g}{item.at_step:>9}{item.allowed:>10.2g}{left:>14}"
        )
    lines.append("")
    if found.other_samples is not None:
        lines.append(f"other samples from step {found.other_samples} on (batch_hash)")
    lines += [f"data:  {difference}" for difference in found.data]
    lines += _keys("Config keys that may change what is trained (reference -> run):", found.trains)
    lines += _keys("Config keys that change rounding, or what is measured (reference -> run):", found.rounds)
    lines += [f"note: {note}" for note in found.notes]
    if found.is_within:
        lines.append("The run is within the tolerance of the reference.")
    return "\n".join(lines)


def _keys(title: str, differences: Mapping[str, tuple[Any, Any]]) -> list[str]:
    if not differences:
        return []
    shown = [f"  {key}: {_value(before)} -> {_value(now)}" for key, (before, now) in differences.items()]
    more = [f"  and {len(shown) - _MOST_KEYS} more"] if len(shown) > _MOST_KEYS else []
    return [title, *shown[:_MOST_KEYS], *more]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def verdict(found: Comparison) -> str:
    """Where a run that is not within the tolerance left its reference, with both values, in one sentence."""
    left, other = found.left, found.other_samples
    if left is None:
        return (
            f"{found.run} trained on other samples than {found.reference} from step {other} on, with losses within it"
        )
    text = (
        f"{found.run} leaves {found.reference} at step {left.step}: {left.quantity} is {left.found:.9g} where the "
        f"reference has {left.wanted:.9g}, a relative difference above {left.allowed:.2g}"
    )
    if other is not None:
        text += f"; it trained on other samples from step {other} on"
    return text


def as_json(found: Comparison) -> str:
    """The comparison as JSON; non-finite values are written as by Python's json."""
    content = {
        "run": str(found.run),
        "reference": str(found.reference),
        "machine": found.machine,
        "within": found.is_within,
        "first_step": int(found.steps[0]),
        "last_step": int(found.steps[-1]),
        "steps": len(found.steps),
        "reference_steps": found.planned,
        "left": asdict(found.left) if found.left is not None else None,
        "quantities": [asdict(item) for item in found.quantities],
        "other_samples_from": found.other_samples,
        "data": found.data,
        "config": {"trains": found.trains, "rounds": found.rounds},
        "notes": found.notes,
    }
    return json.dumps(content, indent=2)
