"""Config of `megads calibrate`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megads.api import ConfigError

_MOST_RANKS = 64


@dataclass
class CalibrateConfig:
    """Config of `megads calibrate`, which measures this machine and writes a device file for megads plan."""

    out: str = "device.yaml"
    """Device file to write; must end in .yaml."""
    ranks: int = 2
    """Ranks that compute at the same time, as in training: they share the machine's memory and cores; with GPUs, each
    rank has its own. With 1, collectives are not measured; for a GPU model that megads plan knows, its table gives the
    links (like: h200 in the file)."""
    threads: int | None = None
    """CPU threads of each rank; null divides the cores evenly."""
    fp32: bool = False
    """Measure GEMMs in fp32, for train.precision=fp32; else in bf16."""
    seconds: float = 0.1
    """Seconds for which each measurement is repeated; the median is used. It also limits the number of training steps
    per model, which is at least 3."""

    def check(self) -> None:
        """Raises ConfigError on invalid values and on an output file that cannot be written."""
        if not self.out.endswith(".yaml"):
            raise ConfigError(f"out = {self.out}: must end in .yaml")
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ConfigError(f"ranks = {self.ranks}: must be 1 to {_MOST_RANKS}; a device file plans as many or fewer")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads = {self.threads}: must be at least 1")
        if not 0 < self.seconds <= 60:
            raise ConfigError(f"seconds = {self.seconds}: must be above 0 and at most 60")
        self._require_writable()

    def _require_writable(self) -> None:
        """Raises ConfigError if the output file cannot be written, before minutes of measuring."""
        path = Path(self.out)
        if path.is_dir():
            raise ConfigError(f"out = {path} is a folder: choose another file")
        try:
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise ConfigError(f"out = {path} cannot be written ({error.strerror}): choose another file") from error
