"""Where prompts come from, and where completions go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.errors import ConfigError, DataError
from megads.evaluate.completion import Completion
from megads.evaluate.config import GenerateConfig
from megads.evaluate.generation import Stop
from megads.evaluate.prompts import Task, completion_line, given_tasks, refuse_to_overwrite


def config(**changes: object) -> GenerateConfig:
    return GenerateConfig(run="x", **changes)  # type: ignore[arg-type]


def test_prompts_of_the_command_line() -> None:
    """Catches an empty prompt taken for none, and none taken for an empty one."""
    assert given_tasks(config(prompt="")) == [Task("")]
    assert given_tasks(config(prompts=["a", ""])) == [Task("a"), Task("")]
    assert given_tasks(config()) == []


def test_files_of_prompts(tmp_path: Path) -> None:
    """Catches blank lines taken for prompts, fields that are lost, and an escaped text in the output."""
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n  two, {three}\n")
    assert given_tasks(config(input=str(lines))) == [Task("one"), Task("  two, {three}")]
    records.write_text('{"id": 7, "q": "漢"}\n{"q": ""}\n')
    tasks = given_tasks(config(input=str(records), prompt_field="q"))
    assert [task.prompt for task in tasks] == ["漢", ""]
    line = completion_line(tasks[0], Completion("漢", "字\n", 3, Stop.length))
    assert "漢" in line and "\n" not in line
    assert json.loads(line) == {"id": 7, "q": "漢", "prompt": "漢", "completion": "字\n", "tokens": 3, "stop": "length"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "there is no such file"),
        ("empty.txt", b"\n \n", "holds no prompts"),
        ("latin.txt", b"na\xefve\n", "cannot be read as UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\nplain\n', r"bad.jsonl:2: not JSON.*belong in a .txt"),
        ("field.jsonl", b'{"text": "a"}\n', r"field.jsonl:1: has no text in 'prompt', it has text: give prompt_field"),
        ("number.jsonl", b"1\n", "it is no object"),
    ],
)
def test_bad_files(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    """Catches a traceback, or a line skipped without a word."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        given_tasks(config(input=str(tmp_path / name)))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Catches the completions of an hour lost to a repeated command, and prompts lost to their own output."""
    path = tmp_path / "out.jsonl"
    refuse_to_overwrite(config(output=str(path)))
    path.touch()
    with pytest.raises(ConfigError, match="exists; choose another output or give overwrite=true"):
        refuse_to_overwrite(config(output=str(path)))
    refuse_to_overwrite(config(output=str(path), overwrite=True))
    with pytest.raises(ConfigError, match="is the input"):
        refuse_to_overwrite(config(input=str(path), output=str(path), overwrite=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"temperature": -1.0}, "temperature = -1.0: must not be negative"),
        ({"temperature": float("nan")}, "must be a finite number"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"prompt": "", "input": "x"}, "prompt and input are both given"),
        ({"output": "x"}, "output = x: give prompt"),
    ],
)
def test_values_out_of_range(change: dict[str, object], message: str) -> None:
    """Catches a value that fails after the model is loaded, or never."""
    config(prompt=None).check()
    with pytest.raises(ConfigError, match=message):
        config(**change).check()
