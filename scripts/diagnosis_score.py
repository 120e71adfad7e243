"""Scores the diagnosis on labelled logs: `python -m scripts.diagnosis_score <labels.csv or .yaml> [<folder>]`.

A CSV table has the columns file, cause, domain, restartable (yes or no) and culprit; the logs are in its folder unless
another is given. A YAML file is a list of messages with cause, restartable, lines, and the lot to which they belong
(tests/tools/diagnose/lots.yaml). Prints the wrong answers, the accuracy for each column and lot, and which causes were
confused with which others.

`--cross-validate` estimates the accuracy on unseen messages: of the model alone, by ten-fold cross-validation over its
own messages; and of the whole, each message diagnosed without the patterns that match its decisive line.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megads.tools.diagnose.decision import Diagnosis, decide
from megads.tools.diagnose.evidence import survey_log
from megads.tools.diagnose.message_model import Knowledge, MessageModel, knowledge, known_messages, signature_messages
from megads.tools.diagnose.signature import SignatureTable, signature_table

_COLUMNS = ("cause", "restartable", "domain", "culprit")
_FOLDS = 10


@dataclass(frozen=True)
class Case:
    """A labelled log.

    Attributes:
        name: name of the file or message.
        text: text of the log.
        labels: labels by column; a message has only the first two.
        lot: lot to which it belongs.
    """

    name: str
    text: bytes
    labels: dict[str, str]
    lot: str = ""


def read_cases(labels: Path, folder: Path) -> list[Case]:
    """Returns the labelled logs of a table or list.

    Args:
        labels: the table or list.
        folder: folder of a table's logs.
    """
    if labels.suffix == ".csv":
        with labels.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [
            Case(row["file"], (folder / row["file"]).read_bytes(), {one: row[one] for one in _COLUMNS}) for row in rows
        ]
    content: list[dict[str, Any]] = yaml.safe_load(labels.read_text())
    return [
        Case(
            row.get("name", row["source"]),
            "\n".join(row["lines"]).encode(),
            {"cause": row["cause"], "restartable": "yes" if row["restartable"] else "no"},
            row.get("lot", ""),
        )
        for row in content
    ]


def diagnose_case(case: Case, known: Knowledge | None = None) -> Diagnosis:
    """Returns the diagnosis from the log alone.

    Args:
        case: the log.
        known: signatures and model; None: those of megads.
    """
    return decide([survey_log(case.name, [case.text], known=known)], known.model if known else None)


def answers(found: Diagnosis) -> dict[str, str]:
    """Returns a diagnosis in the terms of the table."""
    restartable = "yes" if found.restartable else "no"
    cause, domain = str(found.cause or "none found"), str(found.domain or "")
    return {"cause": cause, "restartable": restartable, "domain": domain, "culprit": found.culprit}


def score(cases: Sequence[Case], quiet: bool) -> None:
    """Prints the scores.

    Args:
        cases: the labelled logs.
        quiet: do not print which logs were wrong.
    """
    right: Counter[tuple[str, str]] = Counter()
    confused: Counter[tuple[str, str]] = Counter()
    for case in cases:
        found = answers(diagnose_case(case))
        good = [column for column, label in case.labels.items() if found[column] == label]
        right.update((lot, column) for column in good for lot in {case.lot, ""})
        wrong = [f"{one} {found[one]!r}, not {label!r}" for one, label in case.labels.items() if one not in good]
        if "cause" not in good:
            confused[case.labels["cause"], found["cause"]] += 1
        if wrong and not quiet:
            print(f"{case.name}: {'; '.join(wrong)}")
    for lot in dict.fromkeys([case.lot for case in cases] + [""]):
        total = sum(not lot or case.lot == lot for case in cases)
        for column in cases[0].labels:
            share = 100 * right[lot, column] / total
            print(f"{lot or 'all':<12} {column:<12} {right[lot, column]:>4} of {total}  {share:5.1f}%")
    for (label, taken), count in confused.most_common():
        print(f"{label} taken for {taken}: {count}")


def cross_validate(cases: Sequence[Case]) -> None:
    """Prints the accuracy without the patterns that were written for each log."""
    messages, signatures = known_messages(), signature_table().signatures
    order = random.Random(0).sample(range(len(messages)), len(messages))
    right = 0
    for fold in range(_FOLDS):
        held = set(order[fold::_FOLDS])
        kept = [message for place, message in enumerate(messages) if place not in held]
        model = MessageModel([*kept, *signature_messages(signatures)])
        verdicts = [(model.judge(messages[place].text), messages[place].cause) for place in held]
        right += sum((verdict and verdict.cause) == cause for verdict, cause in verdicts)
    print(f"model alone, {_FOLDS} folds: {right} of {len(messages)}  {100 * right / len(messages):.1f}%")
    good: Counter[str] = Counter()
    for case in cases:
        found = answers(diagnose_case(case, _without_decisive_patterns(case)))
        good.update(column for column, label in case.labels.items() if found[column] == label)
    for column in cases[0].labels:
        share = 100 * good[column] / len(cases)
        print(f"whole without the decisive patterns: {column:<12} {good[column]:>4} of {len(cases)}  {share:5.1f}%")


def _without_decisive_patterns(case: Case) -> Knowledge:
    """Returns signatures and model without any pattern that matches the decisive line."""
    decisive = diagnose_case(case).evidence
    if not decisive:
        return knowledge()
    kept = []
    for signature in signature_table().signatures:
        patterns = tuple(one for one in signature.patterns if not re.search(one, decisive[0].text, re.IGNORECASE))
        if patterns or signature.fallback:
            kept.append(signature if signature.fallback else replace(signature, patterns=patterns))
    return Knowledge(SignatureTable(tuple(kept)), MessageModel([*known_messages(), *signature_messages(kept)]))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.diagnosis_score", description=__doc__)
    parser.add_argument("labels", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--part", choices=("all", "odd", "even"), default="all", help="rows, counted from 1")
    parser.add_argument("--quiet", action="store_true", help="the shares only: for rows that one has not looked at")
    parser.add_argument("--cross-validate", action="store_true", help="a minute for some hundred messages")
    arguments = parser.parse_args()
    cases = read_cases(arguments.labels, arguments.folder or arguments.labels.parent)
    cases = {"all": cases, "odd": cases[0::2], "even": cases[1::2]}[arguments.part]
    score(cases, arguments.quiet)
    if arguments.cross_validate:
        cross_validate(cases)


if __name__ == "__main__":
    main()
