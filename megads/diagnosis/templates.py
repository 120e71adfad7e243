"""Log templates: lines with their variable parts replaced, so that a million lines become a few hundred templates."""

from __future__ import annotations

import re

_VARYING = (
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} \d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d+"), "<time>"),
    (re.compile(r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b"), "<time>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?:[:<]\d+>?)?"), "<address>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (
        re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.+@=~-]+){2,}/?|(?<![\w.])(?:\.{1,2}/|[\w.-]+/){2,}[\w.-]+"),
        "<path>",
    ),
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE), "<number>"),
    (re.compile(r"[ \t]+"), " "),
)
_LONGEST = 400


def template(line: str) -> str:
    """Returns a line with times, addresses, ids, paths, hexadecimal and other numbers replaced by placeholders.

    Exit codes, error numbers and Xids are replaced too: templates serve to count lines and compare incidents, not to
    find the cause.
    """
    text = line[:_LONGEST]
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return text.strip()
