"""What `megads calibrate` can be told."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megads.errors import ConfigError

_MOST_RANKS = 64


@dataclass
class CalibrateConfig:
    """`megads calibrate`: measures this machine and writes a device file that megads plan takes."""

    out: str = "device.yaml"
    """File to write; must end in .yaml."""
    ranks: int = 2
    """Ranks that compute at the same time, as in training: they share the machine's memory and cores; each has a GPU of
    its own where there are some. With 1 nothing is known of collectives: on a GPU whose name megads plan knows links
    are taken from its table (like: h200 in the file)."""
    threads: int | None = None
    """CPU threads of each rank; null shares the cores out evenly."""
    fp32: bool = False
    """Measure products in fp32, for train.precision=fp32; else in bf16."""
    seconds: float = 0.1
    """Seconds for which each measurement is repeated; the median counts. Steps of the models that are trained are as
    many as this allows, at least 3."""

    def check(self) -> None:
        """Raises ConfigError on a file that is no device's, and on numbers that are none."""
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
        """Raises ConfigError where the file could not be written after minutes of measuring."""
        path = Path(self.out)
        if path.is_dir():
            raise ConfigError(f"out = {path} is a folder: choose another file")
        try:
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise ConfigError(f"out = {path} cannot be written ({error.strerror}): choose another file") from error
