"""Where prompts come from, and where completions go."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads.errors import ConfigError, DataError
from megads.evaluate.completion import Completion
from megads.evaluate.config import GenerateConfig


@dataclass(frozen=True)
class Task:
    """A prompt and what came with it.

    Attributes:
        prompt: the text to continue.
        record: the line of JSON it was in; empty for other sources. Its other fields go to the output.
    """

    prompt: str
    record: dict[str, Any] = field(default_factory=dict)


def given_tasks(config: GenerateConfig) -> list[Task]:
    """Returns what the config says to continue, nothing where it leaves that to stdin.

    Raises:
        DataError: the input cannot be read or holds no prompts.
    """
    if config.prompt is not None:
        return [Task(config.prompt)]
    if config.prompts:
        return [Task(prompt) for prompt in config.prompts]
    return _read(Path(config.input), config.prompt_field) if config.input is not None else []


def completion_line(task: Task, completion: Completion) -> str:
    """Returns the line of JSON that the output file gets."""
    made = {
        "prompt": task.prompt,
        "completion": completion.text,
        "tokens": completion.tokens,
        "stop": completion.stop,
    }
    return json.dumps(task.record | made, ensure_ascii=False)


def refuse_to_overwrite(config: GenerateConfig) -> None:
    """Raises ConfigError where the output exists and its loss was not asked for, or where it is the input."""
    if config.output is None:
        return
    output = Path(config.output)
    if config.input is not None and output.resolve() == Path(config.input).resolve():
        raise ConfigError(f"output = {output}: is the input and would be lost; choose another output")
    if output.exists() and not config.overwrite:
        raise ConfigError(f"output = {output}: exists; choose another output or give overwrite=true")


def _read(path: Path, field_name: str) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"input = {path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"input = {path}: cannot be read as UTF-8 text: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"input = {path}: holds no prompts")
    if path.suffix != ".jsonl":
        return [Task(line) for _, line in numbered]
    return [_task(f"{path}:{number}", line, field_name) for number, line in numbered]


def _task(place: str, line: str, field_name: str) -> Task:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}; lines of plain text belong in a .txt file") from error
    if not isinstance(record, dict) or not isinstance(record.get(field_name), str):
        found = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is no object"
        raise DataError(f"{place}: has no text in {field_name!r}, {found}: give prompt_field=<name>")
    return Task(record[field_name], record)
