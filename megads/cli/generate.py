"""`megads generate`: continues prompts with a trained model."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megads.cli.text_stream import say, stream
from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, CheckpointError, ConfigError
from megads.evaluate.config import GenerateConfig
from megads.runtime.environment import wait_passively

if TYPE_CHECKING:
    from megads.evaluate.completion import Prompt, TextGenerator
    from megads.evaluate.prompts import Task

RUNS = Path("runs")


def run(config: GenerateConfig, _invocation: Invocation) -> int:
    """Loads the model and continues what the config gives, or what is typed."""
    wait_passively()
    from megads.cli.interactive import converse
    from megads.evaluate.prompts import given_tasks, refuse_to_overwrite

    config.check()
    tasks = given_tasks(config)
    refuse_to_overwrite(config)
    generator = text_generator(config)
    if not tasks:
        return converse(generator, sys.stdin, config.echo)
    prompts = [_prompt(generator, number, task) for number, task in enumerate(tasks)]
    if config.output is not None:
        _write(generator, tasks, prompts, config)
    elif len(prompts) == 1:
        stream(generator, prompts[0], 0, config.echo)
    else:
        _print_all(generator, prompts, config)
    return EXIT_OK


def text_generator(config: GenerateConfig) -> TextGenerator:
    """Loads what the config names and says so on stderr."""
    from megads.checkpoint.read import open_checkpoint
    from megads.checkpoint.unsharded import load_unsharded
    from megads.data.carried_tokenizer import find_tokenizer
    from megads.evaluate.completion import TextGenerator
    from megads.evaluate.placement import choose_device, choose_dtype
    from megads.evaluate.run_data import dataset_prefixes
    from megads.evaluate.sampling import Sampling

    device = choose_device(config.device)
    handle = open_checkpoint(run_path(config.run))
    for reason in handle.passed_by:
        say(f"passed by: {reason}")
    found = find_tokenizer(dataset_prefixes(handle.folder.parent.parent), config.tokenizer)
    model = load_unsharded(handle, device, choose_dtype(config.precision, device))
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
    generator = TextGenerator(model, found, sampling, config.max_new_tokens, config.end_of_document)
    weights = list(model.parameters())
    say(
        f"{handle.folder}: {sum(weight.numel() for weight in weights):,} parameters, "
        f"{str(weights[0].dtype).removeprefix('torch.')} on {device}; "
        f"tokenizer {found.path}{'' if found.verified else ' (not verified: its dataset is not here)'}"
    )
    return generator


def run_path(given: str) -> Path:
    """Returns the folder that `run` means: a path, or the name of a run in runs/.

    Raises:
        CheckpointError: there is none.
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
    from megads.evaluate.completion import Speed

    speed = Speed()
    for number, done in enumerate(generator.complete_all(prompts, config.batch_size, speed), 1):
        print(f"=== {number} of {len(prompts)}\n{done.prompt if config.echo else ''}{done.text}", flush=True)
    say(speed)


def _write(generator: TextGenerator, tasks: Sequence[Task], prompts: Sequence[Prompt], config: GenerateConfig) -> None:
    """Writes the completions line by line, so that a killed batch leaves those that were finished."""
    from megads.evaluate.completion import Speed
    from megads.evaluate.prompts import completion_line

    speed = Speed()
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
    say(speed)
    print(f"{output}: {len(tasks)} completions")


VERB = Verb("generate", GenerateConfig, run, text_keys=("prompt",))
