"""Generates text with a trained model from prompts on the command line, in files, or typed interactively."""

from __future__ import annotations

import dataclasses
import difflib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, TextIO

import yaml

from megads.api import (
    CONFIG_FILE,
    EXIT_OK,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    DataError,
    FoundTokenizer,
    GenerationSpeed,
    Sampling,
    TextGenerator,
    choose_device,
    choose_dtype,
    find_tokenizer,
    load_unsharded,
    open_checkpoint,
    open_run_tokenizer,
    recorded_config,
    template_beside,
    template_path,
    user_cache_dir,
)
from megads.evaluate.config import GenerateConfig
from megads.evaluate.generation import Completion, Prompt
from megads.tools.prepare.chat import USER, ChatTemplate, TemplateFault, special_tokens
from megads.tools.prepare.small_files import lines_of


def dataset_prefixes(run_dir: Path) -> list[Path]:
    """Returns paths where a run's training data may be, from its frozen config; empty if the config is missing.

    Relative paths are relative to the folder where the run was started: the current folder, or the parent of runs/.
    """
    try:
        content = yaml.safe_load(recorded_config(run_dir / CONFIG_FILE))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return []
    # Not load_frozen, so that runs of earlier versions, whose config lacks current keys, can be read.
    data = content.get("data") if isinstance(content, dict) else None
    datasets: Any = data.get("train") if isinstance(data, dict) else None
    items = datasets if isinstance(datasets, list) else []
    paths = [Path(str(item["path"])) for item in items if isinstance(item, dict) and "path" in item]
    return [base / path for path in paths for base in (Path(), run_dir.parent.parent)]


@dataclass(frozen=True)
class Task:
    """A prompt and the record that it comes from.

    Attributes:
        prompt: the text to continue.
        record: the JSON object of its line, whose fields are copied to the output; empty for other sources.
    """

    prompt: str
    record: dict[str, Any] = field(default_factory=dict)


def config_prompts(config: GenerateConfig) -> list[Task]:
    """Returns the prompts that the config gives; empty if prompts are read from stdin.

    Raises:
        DataError: the input cannot be read or has no prompts.
    """
    if config.prompt is not None:
        return [Task(config.prompt)]
    if config.prompts:
        return [Task(prompt) for prompt in config.prompts]
    return _read(Path(config.input), config.prompt_field) if config.input is not None else []


def completion_line(task: Task, completion: Completion) -> str:
    """Returns the JSON line of a completion for the output file."""
    made = {
        "prompt": task.prompt,
        "completion": completion.text,
        "tokens": completion.tokens,
        "stop": completion.stop,
    }
    return json.dumps(task.record | made, ensure_ascii=False)


def refuse_to_overwrite(config: GenerateConfig) -> None:
    """Raises ConfigError if the output exists and overwrite is not set, or if it is the input."""
    if config.output is None:
        return
    output = Path(config.output)
    if config.input is not None and output.resolve() == Path(config.input).resolve():
        raise ConfigError(f"output = {output}: is the input, which would be overwritten; choose another output")
    if output.exists() and not config.overwrite:
        raise ConfigError(f"output = {output}: exists; choose another output or give overwrite=true")


def _read(path: Path, field_name: str) -> list[Task]:
    tasks = [Task(text, record) for text, record in lines_of(path, field_name, "input", "prompt_field")]
    if not tasks:
        raise DataError(f"input = {path}: holds no prompts")
    return tasks


def stream(
    generator: TextGenerator, prompt: Prompt, number: int, echo: bool, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Prints one completion token by token, then its speed on stderr, even if it is interrupted.

    Raises:
        KeyboardInterrupt: `interrupted`, which is called after every token, returned True.
    """

    speed = GenerationSpeed()
    if echo:
        print(prompt.text, end="", flush=True)
    try:
        for _, text, _ in generator.complete([prompt], [number], speed):
            if text:
                print(text, end="", flush=True)
            if interrupted():
                raise KeyboardInterrupt
    finally:
        print(flush=True)
        print_line(speed)


def print_line(message: object) -> None:
    """Prints one line to stderr."""
    print(message, file=sys.stderr, flush=True)


HISTORY_LINES = 1000
_HELP = "Type a prompt; end a line with a backslash to continue it. Ctrl-C stops the generation, Ctrl-D exits."


def converse(generator: TextGenerator, source: TextIO, echo: bool) -> int:
    """Completes every prompt of a source until it ends.

    Args:
        generator: generates the text.
        source: stdin.
        echo: print each prompt before its completion, unless it was typed at the terminal.

    Raises:
        ConfigError: a piped prompt does not fit the model, or there is no prompt. At a terminal the error is printed
            instead.
    """
    typed = source.isatty()
    number = 0
    for text in _typed() if typed else _joined(_without_mark(source)):
        if not text.strip():
            continue
        try:
            with _interrupts() as interrupted:
                stream(generator, generator.prompt(text), number, echo and not typed, interrupted)
        except ConfigError as error:
            if not typed:
                raise
            print(error, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not typed:
                raise
            print("stopped", file=sys.stderr, flush=True)
        # Every prompt has its own random numbers, so that repeating a prompt gives another completion.
        number += 1
    if not number and not typed:
        raise ConfigError("there is no prompt: give prompt='...', prompts, input, or lines on stdin")
    return EXIT_OK


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed in the block; a second Ctrl-C raises KeyboardInterrupt.

    An exception raised during a token may occur inside a library that swallows it, so that generation continues. This
    was seen once, in tests on a busy machine.
    """
    pressed = Event()

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _without_mark(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines; the first one without a byte order mark."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix("\ufeff")


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Yields prompts, with lines that end in a backslash joined to the next line."""
    begun = ""
    for line in lines:
        text = begun + line.removesuffix("\n")
        begun = ""
        if text.endswith("\\"):
            begun = text[:-1] + "\n"
            continue
        yield text
    if begun:
        yield begun


def _typed() -> Iterator[str]:
    """Yields prompts typed by the user, with the history of earlier sessions on the arrow keys."""
    print(_HELP, file=sys.stderr, flush=True)
    history = user_cache_dir() / "generate_history"
    with suppress(ImportError, OSError):  # a Python without readline, or no history yet
        import readline

        readline.set_history_length(HISTORY_LINES)
        readline.read_history_file(history)
    try:
        yield from _joined(_lines())
    finally:
        with suppress(ImportError, OSError):
            import readline

            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


RUNS = Path("runs")


def generate(config: GenerateConfig) -> int:
    """Loads the model and completes the prompts of the config, of stdin or typed at the terminal."""
    config.check()
    tasks = config_prompts(config)
    refuse_to_overwrite(config)
    generator = text_generator(config)
    if not tasks:
        return converse(generator, sys.stdin, config.echo and not config.chat)
    prompts = [_prompt(generator, number, task) for number, task in enumerate(tasks)]
    if config.output is not None:
        _write(generator, tasks, prompts, config)
    elif len(prompts) == 1:
        stream(generator, prompts[0], 0, config.echo and not config.chat)
    else:
        _print_all(generator, prompts, config)
    return EXIT_OK


def text_generator(config: GenerateConfig) -> TextGenerator:
    """Loads the model and tokenizer of the config, and prints what was loaded to stderr."""
    device = choose_device(config.device)
    handle = open_checkpoint(run_path(config.run))
    for reason in handle.skipped:
        print_line(f"skipped: {reason}")
    found = checkpoint_tokenizer(handle, config.tokenizer)
    model = load_unsharded(handle, device, choose_dtype(config.precision, device))
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
    template = _chat_template(found) if config.chat else None
    if template is not None and (end := template.end_of_answer(found.tokenizer)) is not None:
        end_id = found.tokenizer.token_to_id(end)
        assert end_id is not None, "a special token of this tokenizer"
        found = dataclasses.replace(found, end_ids=(*found.end_ids, end_id))
    if config.special_tokens is not None or config.chat:
        added = bool(config.special_tokens) and not config.chat
        begin_id = found.begin_of_document_id if added else None
        found = dataclasses.replace(found, adds_special_tokens=added, begin_of_document_id=begin_id)
    generator = TextGenerator(
        model, found, sampling, config.max_new_tokens, config.end_of_document, _as_message(template)
    )
    weights = list(model.parameters())
    print_line(
        f"{handle.folder}: {sum(weight.numel() for weight in weights):,} parameters, "
        f"{str(weights[0].dtype).removeprefix('torch.')} on {device}; "
        f"tokenizer {found.path}{'' if found.verified else ' (not verified: its dataset is missing)'}"
    )
    return generator


def _chat_template(found: FoundTokenizer) -> ChatTemplate:
    source = template_beside(found.path)
    if source is None:
        raise ConfigError(
            f"chat = true, but there is no chat template next to {found.path}: the run was not trained on "
            f"conversations (data.messages_field); remove chat, or put a {template_path(found.path).name} there"
        )
    # Special tokens in the template's text are tokenized as such; messages must not contain one.
    found.tokenizer.encode_special_tokens = False
    return chat_template_of(found, source)


def chat_template_of(found: FoundTokenizer, source: str) -> ChatTemplate:
    """Returns a chat template with the tokens of a run's tokenizer.

    Args:
        found: the tokenizer.
        source: Jinja source.
    """
    end = None if found.end_of_document_id is None else found.tokenizer.id_to_token(found.end_of_document_id)
    tokens = {"eos_token": end or "", **found.template_tokens}
    return ChatTemplate(source, tokens["eos_token"], special_tokens(found.tokenizer), tokens.get("bos_token", ""))


def _as_message(template: ChatTemplate | None) -> Callable[[str], str]:
    """Returns the function that turns a text into a prompt."""

    def prompt(text: str) -> str:
        assert template is not None
        try:
            return template.prompt([{"role": USER, "content": text}])
        except TemplateFault as fault:
            raise ConfigError(f"{fault}, which a prompt cannot contain with chat=true") from fault

    return str if template is None else prompt


def checkpoint_tokenizer(handle: CheckpointHandle, given: str | None = None) -> FoundTokenizer:
    """Opens the tokenizer that a checkpoint was trained with: the run's own, even if its data is missing.

    Args:
        handle: the checkpoint; for one of an earlier version, without a tokenizer record, the dataset's is used.
        given: path of a tokenizer file to use instead.

    Raises:
        DataError: the tokenizer is missing, damaged or not the one of the training.
    """
    run_dir, record = handle.folder.parent.parent, handle.manifest.run.tokenizer
    prefixes = dataset_prefixes(run_dir)
    if record is None:
        return find_tokenizer(prefixes, given)
    return open_run_tokenizer(run_dir, record, given, prefixes)


def run_path(given: str) -> Path:
    """Returns the folder of a run, given as a path or as the name of a run in runs/.

    Raises:
        CheckpointError: there is no such folder.
    """
    for path in (Path(given), RUNS / given):
        if path.is_dir():
            return path
    known = sorted(path.name for path in RUNS.glob("*") if (path / "checkpoints").is_dir())
    close = difflib.get_close_matches(Path(given).name, known, n=1) or known
    hint = f"; {RUNS}/ has {', '.join(close[:5])}" if close else ""
    raise CheckpointError(f"run = {given}: there is no such folder{hint}")


def _prompt(generator: TextGenerator, number: int, task: Task) -> Prompt:
    try:
        return generator.prompt(task.prompt)
    except ConfigError as error:
        raise ConfigError(f"prompt {number + 1}: {error}") from error


def _print_all(generator: TextGenerator, prompts: Sequence[Prompt], config: GenerateConfig) -> None:

    speed = GenerationSpeed()
    for number, done in enumerate(generator.complete_all(prompts, config.batch_size, speed), 1):
        prompt = done.prompt if config.echo and not config.chat else ""
        print(f"=== {number} of {len(prompts)}\n{prompt}{done.text}", flush=True)
    print_line(speed)


def _write(generator: TextGenerator, tasks: Sequence[Task], prompts: Sequence[Prompt], config: GenerateConfig) -> None:
    """Writes the completions line by line, so that a killed batch keeps the finished ones."""
    speed = GenerationSpeed()
    output = Path(str(config.output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w", encoding="utf-8") as file:
            completions = generator.complete_all(prompts, config.batch_size, speed)
            for task, completion in zip(tasks, completions, strict=True):
                file.write(completion_line(task, completion) + "\n")
                file.flush()
    except OSError as error:
        raise ConfigError(f"output = {output}: cannot be written: {error.strerror}; choose another output") from error
    print_line(speed)
    print(f"{output}: {len(tasks)} completions")
