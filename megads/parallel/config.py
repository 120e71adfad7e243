"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError


@dataclass
class ParallelConfig:
    """Ranks are numbered tensor innermost, then pipeline, then data."""

    tp: int = 1
    """Tensor parallel size: every block's matrices are cut over this many ranks."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size: replicas of the model, over which ZeRO-1 shards the optimizer."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def check(self) -> None:
        """Raises ConfigError on sizes below one."""
        for name in ("tp", "pp", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
