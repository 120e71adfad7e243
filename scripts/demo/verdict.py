#!/usr/bin/env python3
"""Checks whether a run learned more than token frequencies: compares its last validation loss with the unigram entropy.

Exits 0 if the loss is at least MARGIN below the unigram entropy of the same tokens, 1 otherwise. With --finished it
prints nothing and exits 0 if the run reached its planned end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

MARGIN = 0.5
"""Nats below the unigram entropy that a model which learns from context reaches within the demo."""


def finished(run_dir: Path) -> bool:
    """Returns whether the last start of the run ended with exit code 0."""
    exits = [event for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] in ("launch", "exit")]
    return bool(exits) and exits[-1].get("exit_code") == 0


def verdict(run_dir: Path) -> int:
    """Prints the comparison and returns the exit code."""
    records = list(read_json_lines(run_dir / METRICS_FILE))
    validations = [record for record in records if any(key.endswith("/unigram_loss") for key in record)]
    if not validations:
        print(f"{run_dir / METRICS_FILE} holds no validation: the run did not finish")
        return 1
    last = validations[-1]
    name = next(key.split("/")[1] for key in last if key.endswith("/unigram_loss"))
    loss, unigram = last[f"valid/{name}/loss"], last[f"valid/{name}/unigram_loss"]
    print(f"steps: {last['step']}, tokens: {last['tokens']:,}")
    print(f"validation loss: {loss:.4f} nats a token; unigram entropy: {unigram:.4f}; gained: {unigram - loss:.4f}")
    if loss <= unigram - MARGIN:
        print(f"the model learned from context: more than {MARGIN} nats below the unigram entropy")
        return 0
    print(f"the model did NOT learn: the loss is not {MARGIN} nats below the unigram entropy")
    return 1


def main() -> None:
    """Parses the command line and runs the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--finished", action="store_true", help="only set the exit code: whether the run finished")
    arguments = parser.parse_args()
    if arguments.finished:
        sys.exit(0 if finished(arguments.run_dir) else 1)
    sys.exit(verdict(arguments.run_dir))


if __name__ == "__main__":
    main()
