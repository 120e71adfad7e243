"""`megads <verb> [overrides]`: finds the verb and hands it the rest of the command line."""

from __future__ import annotations

import difflib
import importlib
import sys

from megads import __version__
from megads.errors import EXIT_OK, ConfigError

# Each verb is a module of this package with a VERB; it is imported only when called.
VERBS = {
    "train": "pretrain a model, or continue a run",
    "plan": "parameters, memory per rank and FLOPs of a run, nothing started",
    "preprocess": "turn raw text into an indexed dataset",
    "tokenizer": "train a BPE tokenizer on raw text",
}


def main() -> None:
    """The console script; exits with the verb's code."""
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
    if verb not in VERBS:
        nearest = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        print(f"megads: unknown verb {verb}{hint}; verbs are {', '.join(VERBS)}", file=sys.stderr)
        return ConfigError.exit_code
    from megads.cli.entry import run_verb

    return run_verb(importlib.import_module(f"megads.cli.{verb}").VERB, rest)


def _help() -> str:
    lines = ["Usage: megads <verb> [key=value ...]", "", "Verbs:"]
    lines += [f"  {name:<12} {summary}" for name, summary in VERBS.items()]
    lines += ["", "megads <verb> --help lists a verb's keys; --cfg job prints its config; -m sweeps; --version."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
