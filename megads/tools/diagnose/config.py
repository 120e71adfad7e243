"""What `megads diagnose` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megads.errors import ConfigError


@dataclass
class IncidentsConfig:
    """Past incidents of this site, one JSON line each."""

    file: str | None = None
    """File that keeps them, shared by all who should learn from them; null keeps and looks up none."""
    store: bool = False
    """Add this diagnosis to the file."""
    note: str | None = None
    """What a person found out about it, stored with it and shown when the like of it comes again."""


@dataclass
class LanguageModelConfig:
    """A language model that is asked for advice; it is told the cause and the decisive lines, with secrets masked."""

    endpoint: str | None = None
    """Base URL of an OpenAI-compatible service, for example http://127.0.0.1:8000/v1; null asks none."""
    model: str = "default"
    """Name of the model there."""
    key_file: str | None = None
    """File that holds the service's key; null sends none."""
    timeout_s: float = 60.0
    """Longest wait for the answer, in seconds."""


@dataclass
class DiagnoseConfig:
    """`megads diagnose`: why a run failed, whether a restart helps, who is to blame, and the lines that say so."""

    run: str | None = None
    """Run directory, or the id of a run in runs/: its records and the logs of its last start are read."""
    logs: Any = field(default_factory=list)
    """A log file or folder, or a list of them, also of other trainers, SLURM and the kernel; .gz and .zst too."""
    flight_recorder: Any = field(default_factory=list)
    """A dump of torch's flight recorder (NCCL or gloo, pickled or JSON) or a folder of them, or a list; a dump's name
    ends in its rank."""
    json: bool = False
    """Print one JSON object."""
    templates: int = 0
    """List so many of the logs' templates, those of the fewest lines first."""
    incidents: IncidentsConfig = field(default_factory=IncidentsConfig)
    """Past incidents of this site."""
    llm: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """A language model that is asked for advice."""

    @property
    def log_paths(self) -> list[str]:
        """logs as a list."""
        return [self.logs] if isinstance(self.logs, str) else list(self.logs)

    @property
    def dump_paths(self) -> list[str]:
        """flight_recorder as a list."""
        return [self.flight_recorder] if isinstance(self.flight_recorder, str) else list(self.flight_recorder)

    def check(self) -> None:
        """Raises ConfigError unless there is something to read, and what is asked can be done."""
        for name in ("logs", "flight_recorder"):
            paths = getattr(self, name)
            if not isinstance(paths, str | list) or not all(isinstance(path, str) and path for path in paths):
                raise ConfigError(
                    f"{name} = {paths!r}: want a file or folder, or a list, as in {name}='[a.log, b.log]'"
                )
        if not self.run and not self.logs and not self.flight_recorder:
            raise ConfigError(
                "nothing to diagnose: give run=<run directory>, logs=[<file>, ...] or flight_recorder=[<folder>]"
            )
        if self.templates < 0:
            raise ConfigError(f"templates = {self.templates}: must not be negative")
        if (self.incidents.store or self.incidents.note is not None) and self.incidents.file is None:
            raise ConfigError(
                "incidents.store and incidents.note need incidents.file=<file>, where the incident is kept"
            )
        if self.incidents.note is not None and not self.incidents.store:
            raise ConfigError("incidents.note is stored with the incident: give incidents.store=true too")
        if self.llm.endpoint is not None and urlsplit(self.llm.endpoint).scheme not in ("http", "https"):
            raise ConfigError(f"llm.endpoint = {self.llm.endpoint}: want a URL that begins with http:// or https://")
        if self.llm.timeout_s <= 0:
            raise ConfigError(f"llm.timeout_s = {self.llm.timeout_s}: must be greater than 0")
