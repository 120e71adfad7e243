"""`megads.train(...)`: the command `megads train` as a function, for notebooks and Python programs."""

from __future__ import annotations

import contextlib
import io
import numbers
import os
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from megads.cli.entry import compose_typed, hydra_initialized, prepare_composing
from megads.cli.train import VERB
from megads.cli.values import quoted
from megads.cli.verb import Invocation
from megads.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, Preempted, StopRequested
from megads.runtime import progress

if TYPE_CHECKING:
    from megads.tools.notebook import RunHandle

_RESUMABLE = (EXIT_OK, StopRequested.exit_code, Preempted.exit_code)


def train(*config: str | Mapping[str, Any]) -> RunHandle:
    """Starts or continues a run, as `megads train` does, shows its progress, and returns when it has ended.

    Ctrl-C, or a notebook's "interrupt kernel", saves a checkpoint after the current step and stops the run; the same
    call continues it. A second one kills it.

    Args:
        config: overrides as on the command line, such as "experiment=first", or mappings from keys to Python values,
            such as {"data.raw": "notes", "train": {"steps": 20}}. Later ones take precedence.

    Returns:
        The run. Its `exit_code` is 0 if it is finished, 5 or 6 if it was stopped after saving.

    Raises:
        ConfigError: the config is refused.
        MegadsError: the run cannot be started.
        RunFailed: the run has failed.
        KeyboardInterrupt: interrupted before its ranks started, or killed by a second interrupt.
    """
    arguments = [text for part in config for text in ([part] if isinstance(part, str) else _overrides(part))]
    run_dirs: list[Path] = []
    with _output_to_the_cell():
        given = prepare_composing(VERB, arguments)
        if flags := [text for text in given if text.startswith("-")]:
            raise ConfigError(
                f"{flags[0]}: megads.train takes overrides only; hydra.searchpath=[file://<folder>] adds a folder of "
                "your own configs, and `megads train -m` runs sweeps"
            )
        with _outer_hydra_kept(), hydra_initialized(VERB.name):
            composed = compose_typed(VERB.name, VERB.schema, given)
        progress.leave()
        code = VERB.run(composed.config, Invocation(composed.choices, set(), run_dirs.append))
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    # Imported late: it imports torch, which the launcher does without.
    from megads.tools.notebook import RunFailed, RunHandle

    run = RunHandle(run_dirs[-1], code)
    if code not in _RESUMABLE:
        raise RunFailed(run)
    return run


def _overrides(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields a mapping as overrides; nested mappings are sections."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{key}.")
        else:
            yield f"{key}={_value(key, value)}"


def _value(key: str, value: Any) -> str:
    """Returns a Python value as Hydra's grammar writes it.

    Raises:
        ConfigError: a config has no value of this type.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() | os.PathLike():
            return quoted(os.fspath(value.value if isinstance(value, Enum) else value))
        case numbers.Integral():  # NumPy's too
            return str(int(value))
        case numbers.Real():
            return repr(float(value))
        case list() | tuple() | range():
            return f"[{','.join(_value(key, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{name}:{_value(key, item)}' for name, item in value.items())}}}"
    raise ConfigError(f"{key} = {value!r}: is a {type(value).__name__}; want text, a path, a number, a list or a dict")


class _CellOutput(io.TextIOBase):
    """A notebook's output stream without its descriptor, which is that of the notebook server's terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _outer_hydra_kept() -> Iterator[None]:
    """Lets a program that is a Hydra application itself call megads.train: Hydra keeps one state per process."""
    outer, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        # Composing has replaced the first of the two objects.
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = outer, config


@contextlib.contextmanager
def _output_to_the_cell() -> Iterator[None]:
    """Shows the run's output below the notebook's cell: a stream that is written by its descriptor bypasses it."""
    with contextlib.ExitStack() as stack:
        # A stream of a terminal, a file or a pipe has the buffer through which it writes to its descriptor.
        if not hasattr(sys.stdout, "buffer"):
            stack.enter_context(contextlib.redirect_stdout(_CellOutput(sys.stdout)))
        if not hasattr(sys.stderr, "buffer"):
            stack.enter_context(contextlib.redirect_stderr(_CellOutput(sys.stderr)))
        yield
