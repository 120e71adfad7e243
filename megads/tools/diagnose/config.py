"""Settings of `megads diagnose`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megads.api import ConfigError


@dataclass
class IncidentsConfig:
    """File of past incidents, one JSON line per incident."""

    file: str | None = None
    """File with incidents, which several users may share; null neither reads nor stores incidents."""
    store: bool = False
    """Add this diagnosis to the file."""
    note: str | None = None
    """Finding of a person, stored with the diagnosis and shown for similar failures."""


@dataclass
class LanguageModelConfig:
    """Language model that gives advice; it receives the cause and the decisive log lines, with secrets masked."""

    endpoint: str | None = None
    """Base URL of an OpenAI-compatible service, for example http://127.0.0.1:8000/v1; null uses none."""
    model: str = "default"
    """Name of the model at the service."""
    key_file: str | None = None
    """File with the API key of the service; null sends no key."""
    timeout_s: float = 60.0
    """Timeout of the request, in seconds."""


@dataclass
class DiagnoseConfig:
    """`megads diagnose`: root cause of a failed run, whether a restart helps, the culprit, and the evidence."""

    run: str | None = None
    """Run directory, or the id of a run in runs/: its events and the logs of its last start are read."""
    logs: Any = field(default_factory=list)
    """A log file or folder, or a list of them, including logs of other trainers, SLURM and the kernel; .gz and .zst are
    supported."""
    flight_recorder: Any = field(default_factory=list)
    """A dump of PyTorch's flight recorder (NCCL or gloo, pickle or JSON), a folder of dumps, or a list of both; the
    name of a dump ends in its rank."""
    json: bool = False
    """Print one JSON object."""
    templates: int = 0
    """Number of log templates to list, rarest first."""
    incidents: IncidentsConfig = field(default_factory=IncidentsConfig)
    """Past incidents."""
    llm: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """Language model that gives advice."""

    @property
    def log_paths(self) -> list[str]:
        """logs as a list."""
        return [self.logs] if isinstance(self.logs, str) else list(self.logs)

    @property
    def dump_paths(self) -> list[str]:
        """flight_recorder as a list."""
        return [self.flight_recorder] if isinstance(self.flight_recorder, str) else list(self.flight_recorder)

    def check(self) -> None:
        """Raises ConfigError if no input is given, or if a setting is invalid."""
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
