"""`megads <verb> [overrides]`: finds the verb and hands it the rest of the command line."""

from __future__ import annotations

import difflib
import importlib
import sys

from megads import __version__
from megads.errors import EXIT_OK, ConfigError
from megads.runtime.terminal_text import escape_terminal_output

# Each verb is a module of this package with a VERB; it is imported only when called.
VERBS = {
    "train": "pretrain a model, or continue a run",
    "generate": "continue a text with a trained model",
    "why": "the documents and text that a step trained on",
    "plan": "parameters, memory per rank and FLOPs of a run, nothing started",
    "verify_layout": "does a layout train the same model as one process?",
    "preprocess": "turn raw text into an indexed dataset",
    "dataset": "merge, split, inspect, count or check indexed datasets",
    "tokenizer": "train a BPE tokenizer on raw text",
    "doctor": "check this machine and its software",
    "check_nodes": "which nodes of a SLURM job are fit to train?",
    "report": "draw a run as one HTML page and pictures",
}
# What is no Hydra app.
COMMANDS = {
    "rehearse": "run your own sbatch script, scaled down, on a private SLURM",
    "completion": "print the script for tab completion in bash, zsh or fish",
}
# Asked by those scripts on every press of the tab key.
_COMPLETE = "__complete"


def main() -> None:
    """The console script; exits with the verb's code."""
    escape_terminal_output()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: the verb and what follows it.
    """
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_help())
        return EXIT_OK if arguments else ConfigError.exit_code
    if arguments[0] in ("--version", "-V"):
        print(f"megads {__version__}")
        return EXIT_OK
    verb, *rest = arguments
    if verb == _COMPLETE:
        return _complete(rest)
    if verb == "completion":
        return _completion(rest)
    if verb == "rehearse":
        from megads.tools.rehearse.command import run as rehearse

        return rehearse(rest)
    if verb not in VERBS:
        known = [*VERBS, *COMMANDS]
        nearest = difflib.get_close_matches(verb, known, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        print(f"megads: unknown verb {verb}{hint}; verbs are {', '.join(known)}", file=sys.stderr)
        return ConfigError.exit_code
    if verb == "doctor":
        from megads.cli.doctor import hydra_defect, run_without_hydra

        if defect := hydra_defect():
            return run_without_hydra(rest, defect)
    from megads.cli.entry import run_verb

    return run_verb(importlib.import_module(f"megads.cli.{verb}").VERB, rest)


def _complete(words: list[str]) -> int:
    """Prints the words that may stand at the cursor, each with its explanation after a tab."""
    from megads.cli.completion import complete

    for text, explanation in complete(words or [""], VERBS, COMMANDS):
        print(f"{text}\t{explanation}")
    return EXIT_OK


def _completion(arguments: list[str]) -> int:
    """Prints the script of a shell, or how to use them."""
    from megads.cli.completion import SHELLS, script

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
    lines += [f"  {name:<14} {summary}" for name, summary in {**VERBS, **COMMANDS}.items()]
    lines += [
        "",
        "megads <verb> --help lists a verb's groups and keys; --cfg job prints its config; -m sweeps; --version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
