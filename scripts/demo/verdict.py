#!/usr/bin/env python3
"""Checks whether a run learned more than token frequencies: compares its last validation loss with the unigram entropy.

Exits 0 if the loss is at least MARGIN below the unigram entropy of the same tokens, 1 otherwise. With --finished it
prints nothing and exits 0 if the run reached its planned end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

MARGIN = 1.0
"""Nats below the unigram entropy that a model which learns from context reaches within the demo, on any machine."""


def finished(run_dir: Path) -> bool:
    """Returns whether the last start of the run trained to its end and exited with code 0."""
    last: dict[str, dict[str, Any]] = {event["event"]: event for event in read_json_lines(run_dir / EVENTS_FILE)}
    launch, end, left = (last.get(name, {"time": 0.0}) for name in ("launch", "end", "exit"))
    # A start that times steps for train.minutes exits with 0, too, but has no end.
    return left.get("exit_code") == 0 and not end.get("stopped", True) and launch["time"] <= end["time"] <= left["time"]


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
