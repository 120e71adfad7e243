"""Scores the diagnosis on labelled logs: `python -m scripts.diagnosis_score <labels.csv> [<folder>] [--part odd]`.

The table has the columns file, cause, domain, restartable (yes or no) and culprit; the logs lie in its folder unless
another is named. Prints what was wrong, the share of right answers for each column, and which causes were taken for
which others.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

from megads.diagnosis.decision import Diagnosis, decide
from megads.diagnosis.evidence import survey_log

_COLUMNS = ("cause", "restartable", "domain", "culprit")


def diagnose_file(path: Path) -> Diagnosis:
    """Returns what the log alone says."""
    return decide([survey_log(path.name, [path.read_bytes()])])


def answers(found: Diagnosis) -> dict[str, str]:
    """Returns a diagnosis in the words of the table."""
    restartable = "yes" if found.restartable else "no"
    return {"cause": found.cause, "restartable": restartable, "domain": found.domain, "culprit": found.culprit}


def score(labels: Path, folder: Path, part: str, quiet: bool) -> None:
    """Prints the scores.

    Args:
        labels: the table.
        folder: holds the logs.
        part: all, or the odd or the even rows, counted from 1.
        quiet: leaves out which files were wrong.
    """
    with labels.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"all": rows, "odd": rows[0::2], "even": rows[1::2]}[part]
    right: Counter[str] = Counter()
    confused: Counter[tuple[str, str]] = Counter()
    for row in wanted:
        found = answers(diagnose_file(folder / row["file"]))
        right.update(column for column in _COLUMNS if found[column] == row[column])
        wrong = [
            f"{column} {found[column]!r}, not {row[column]!r}" for column in _COLUMNS if found[column] != row[column]
        ]
        if found["cause"] != row["cause"]:
            confused[row["cause"], found["cause"]] += 1
        if wrong and not quiet:
            print(f"{row['file']}: {'; '.join(wrong)}")
    for column in _COLUMNS:
        print(f"{column:<12} {right[column]:>4} of {len(wanted)}  {100 * right[column] / max(1, len(wanted)):5.1f}%")
    for (label, taken), count in confused.most_common():
        print(f"{label} taken for {taken}: {count}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.diagnosis_score", description=__doc__)
    parser.add_argument("labels", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--part", choices=("all", "odd", "even"), default="all")
    parser.add_argument("--quiet", action="store_true", help="the shares only: for rows that one has not looked at")
    arguments = parser.parse_args()
    score(arguments.labels, arguments.folder or arguments.labels.parent, arguments.part, arguments.quiet)


if __name__ == "__main__":
    main()
