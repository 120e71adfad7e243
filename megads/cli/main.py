"""`megads <verb> [overrides]`: dispatches a command line to its verb, and computes shell completions.

Completion must be fast, so this module does not import Hydra, torch or DeepSpeed.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megads import __version__
from megads.cli.help_text import fit_width, two_columns
from megads.cli.verb import Key, Verb, group_names, group_options, keys, own_config_dirs
from megads.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, exit_codes_text
from megads.runtime import progress
from megads.runtime.terminal_text import escape_terminal_output

# Each verb is a module of this package with a VERB; it is imported only when called, and with it the tool that it runs.
VERBS = {
    "train": "pretrain a model, or continue a run",
    "generate": "generate text with a trained model",
    "evaluate": "run lm-eval tasks and measure perplexity of a checkpoint",
    "export": "write a trained model in Hugging Face format",
    "import": "import a Hugging Face model or another trainer's checkpoint",
    "checkpoint": "list, verify, average or reshard the checkpoints of a run",
    "diagnose": "find the root cause of a failure, the responsible rank or node, and whether a restart helps",
    "why": "show the documents and text that a step trained on",
    "plan": "predict parameters, memory per rank, FLOPs and step time of a run",
    "calibrate": "measure this machine, for megads plan device=<file>",
    "verify_layout": "check that a layout trains the same model as one process",
    "compare": "say whether a run is within the tolerance of a reference run, and where it left it",
    "preprocess": "turn raw text into an indexed dataset",
    "dataset": "merge, split, inspect, count or check indexed datasets",
    "tokenizer": "train a BPE tokenizer on raw text",
    "doctor": "check this machine and its software",
    "chaos": "inject faults into a run and check that nothing is lost",
    "check_nodes": "check the health of the nodes of a SLURM job",
    "report": "write a report of a run: one HTML page and figures",
    "watch": "show runs live on a page in the browser",
}
# Commands of tools that are not Hydra apps: `run` of the tool's module `command`.
COMMANDS = {"rehearse": "run your own sbatch script, scaled down, on a private SLURM"}
_COMPLETION = {"completion": "print the script for tab completion in bash, zsh or fish"}
# Called by the completion scripts.
_COMPLETE = "__complete"

SHELLS = {
    "bash": 'eval "$(megads completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(megads completion zsh)" in ~/.zshrc, after compinit',
    "fish": "megads completion fish | source, in ~/.config/fish/config.fish",
}
"""Supported shells, and how to load the completion script in each."""

_FLAGS = {
    "--help": "the verb's groups and keys",
    "--cfg": "print the composed config: job, hydra or all",
    "--resolve": "with --cfg: resolve interpolations",
    "--multirun": "run every point of comma-separated values",
    "--config-dir": "a folder of your own configs",
    "--info": "Hydra's information on itself, the config and the plugins",
}
_CFG = {"job": "the verb's config", "hydra": "Hydra's own config", "all": "both"}


def main() -> None:
    """Entry point of the console script; exits with the verb's exit code."""
    escape_terminal_output(progress.cleared_line)
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("megads: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    finally:
        progress.leave()
    if code == EXIT_INTERRUPTED:
        # If the interrupt hit an exec() of text, as @dataclass calls during an import, CPython sets a flag and would
        # end by SIGINT instead of with this code; the next exec() clears the flag.
        exec("")
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: the verb and its arguments.
    """
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_help())
        return EXIT_OK if arguments else ConfigError.exit_code
    if "--version" in arguments or arguments[0] == "-V":
        print(f"megads {__version__}")
        return EXIT_OK
    verb, *rest = arguments
    if verb == _COMPLETE:
        return _complete(rest)
    if verb == "completion":
        return _completion(rest)
    if verb not in VERBS and verb not in COMMANDS:
        known = [*VERBS, *COMMANDS, *_COMPLETION]
        nearest = difflib.get_close_matches(verb, known, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        print(f"megads: unknown verb {verb}{hint}; verbs are {', '.join(known)}", file=sys.stderr)
        return ConfigError.exit_code
    try:
        return _run_command(verb, rest)
    except ModuleNotFoundError as error:
        if not _is_missing_tool(error):
            raise
        print(f"megads {verb}: needs {error.name}, which is not installed: install all of megads", file=sys.stderr)
        return ConfigError.exit_code


def _is_missing_tool(error: ModuleNotFoundError) -> bool:
    return (error.name or "").startswith("megads.tools")


def _run_command(name: str, rest: list[str]) -> int:
    if name in COMMANDS:
        return int(importlib.import_module(f"megads.tools.{name}.command").run(rest))
    found = importlib.import_module(f"megads.cli.{name}")
    # Hydra itself may be what is broken.
    if name == "doctor" and (defect := found.hydra_defect()):
        return int(found.run_without_hydra(rest, defect))
    if not any(argument.startswith("-") for argument in rest):
        progress.enter("reading the config", said_after_s=math.inf)
    from megads.cli.entry import run_verb

    return run_verb(found.VERB, rest)


def _complete(words: list[str]) -> int:
    """Prints the completions of the last word, each with its explanation after a tab."""
    for text, explanation in complete(words or [""]):
        print(f"{text}\t{explanation}")
    return EXIT_OK


def _completion(arguments: list[str]) -> int:
    """Prints the completion script of a shell, or the usage."""
    if len(arguments) == 1 and arguments[0] in SHELLS:
        print(script(arguments[0]), end="")
        return EXIT_OK
    asked = arguments in (["--help"], ["-h"])
    lines = [f"Usage: megads completion {'|'.join(SHELLS)}", "", "To complete verbs, groups, keys and values with tab:"]
    lines += [f"  {shell:<5} {use}" for shell, use in SHELLS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return EXIT_OK if asked else ConfigError.exit_code


def _help() -> str:
    lines = ["Usage: megads <verb> [key=value ...]", "", "Verbs:"]
    lines.append(two_columns(list({**VERBS, **COMMANDS, **_COMPLETION}.items()), indent=2))
    lines += [
        "",
        "megads <verb> --help lists a verb's groups and keys; --cfg job prints its config; -m sweeps; --version.",
        "",
        exit_codes_text(),
    ]
    return fit_width("\n".join(lines))


class Suggestion(NamedTuple):
    """One completion; a text that ends in `=` or `.` is completed further."""

    text: str
    explanation: str


def script(shell: str) -> str:
    """Returns the completion script of a shell.

    Args:
        shell: one of SHELLS.
    """
    return (Path(__file__).parent / "shells" / f"megads.{shell}").read_text(encoding="utf-8")


def complete(words: Sequence[str]) -> list[Suggestion]:
    """Returns the completions of the last word; none if a file name or a free value is expected.

    Args:
        words: words of the command line after `megads`, up to the cursor; the last word may be empty.
    """
    *before, current = words
    if not before:
        return _matching(
            {**VERBS, **COMMANDS, **_COMPLETION, "--help": "all verbs", "--version": "the version"}, current
        )
    if before[0] == "completion":
        return _matching(SHELLS, current) if len(before) == 1 else []
    if before[0] not in VERBS or before[-1] in ("--config-dir", "-cd"):
        return []
    if before[-1] in ("--cfg", "-c"):
        return _matching(_CFG, current)
    try:
        verb: Verb = importlib.import_module(f"megads.cli.{before[0]}").VERB
    except ModuleNotFoundError as error:
        if _is_missing_tool(error):
            return []
        raise
    if current.startswith("-"):
        return _matching({**dict.fromkeys(verb.flags, "short for an override"), **_FLAGS}, current)
    # +key=value and ++key=value are overrides too.
    sign = current[: len(current) - len(current.lstrip("+~"))]
    found = _override(verb, current[len(sign) :], own_config_dirs(words))
    words_alone = {flag: override for flag, override in verb.flags.items() if not flag.startswith("-")}
    return _matching(words_alone, current) + [Suggestion(sign + text, explanation) for text, explanation in found]


def _override(verb: Verb, current: str, own_dirs: Sequence[Path]) -> list[Suggestion]:
    """Returns completions of an override: groups, sections, keys or values."""
    name, equals, value = current.partition("=")
    groups = group_names(verb.name)
    known = [key for key in keys(verb.schema) if "[]" not in key.name]
    if not equals:
        choices = {f"{group}=": f"choose one of {group}'s options" for group in groups}
        return _matching({**choices, **dict(_next_parts(known, name))}, current)
    if name in groups:
        values = group_options(name, own_dirs)
    else:
        values = {choice: "" for key in known if key.name == name for choice in key.choices}
    # With -m the value may be a comma-separated list, of which the last item is completed.
    typed = current[: len(current) - len(value.rpartition(",")[2])]
    return _matching({typed + option: explanation for option, explanation in values.items()}, current)


def _next_parts(known: Sequence[Key], current: str) -> Iterator[tuple[str, str]]:
    """Yields keys of one level: `train.` first, the keys of that section once the dot is typed."""
    depth = current.count(".")
    for key in known:
        if key.name.count(".") == depth:
            kind = "" if key.is_section else f" ({key.kind}; {key.default})"
            yield f"{key.name}{'.' if key.is_section else '='}", f"{key.explanation}{kind}"


def _matching(options: Mapping[str, str], current: str) -> list[Suggestion]:
    return [Suggestion(text, explanation) for text, explanation in options.items() if text.startswith(current)]


if __name__ == "__main__":
    main()
