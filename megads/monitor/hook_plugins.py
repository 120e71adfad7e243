"""Hooks of plugins: what they are told of a run when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.engine.interface import TrainEngine
from megads.errors import ConfigError
from megads.runtime.hooks import Hook
from megads.runtime.metrics import EventWriter
from megads.runtime.registry import HOOKS


@dataclass(frozen=True)
class HookContext:
    """What a hook may use beside the `StepInfo` of each step.

    Attributes:
        run_dir: the run's folder.
        rank: of this process; every rank makes and calls every hook.
        world_size: ranks.
        engine: holds weights and optimizer state (`named_shards`), and validates (`evaluate`, on all ranks together).
        events: writes a line of events.jsonl: `write("name", key=value)`; of no effect but on rank 0.
    """

    run_dir: Path
    rank: int
    world_size: int
    engine: TrainEngine
    events: EventWriter


def plugin_hooks(hooks: Mapping[str, Mapping[str, Any]], context: HookContext) -> list[Hook]:
    """Makes the hooks that a config names, in its order.

    Args:
        hooks: settings by name, complete.
        context: for each of them.

    Raises:
        ConfigError: one of them lacks a method of `Hook`.
    """
    made: list[Hook] = []
    for name, options in hooks.items():
        hook = HOOKS.make(name, options, context)
        missing = [method for method in ("on_start", "on_step", "on_end") if not hasattr(hook, method)]
        if missing:
            raise ConfigError(f"hooks.{name}: {type(hook).__name__} has no {', '.join(missing)}; see megads.Hook")
        made.append(hook)
    return made
