"""Records and files that give no document: counts, examples, and the largest share that is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megads.api import KEPT_EXAMPLES, DataError
from megads.tools.prepare.records import NoDocument
from megads.tools.prepare.text_files import first_names

_WITHOUT_TEXT = ("empty", "null")
"""Beginnings of the reasons for which no text is lost."""
_FEW_REJECTED = 10


class RejectedLine(NamedTuple):
    """A line without a document, or a whole file, which has line 0."""

    source: str
    line: int
    why: NoDocument

    @property
    def loses_text(self) -> bool:
        """Whether there was text: an empty record, or a null, has none."""
        return not self.why.reason.startswith(_WITHOUT_TEXT)

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.why}" if self.line else f"{self.source}: {self.why}"


@dataclass
class Rejections:
    """Lines and whole files without a document.

    Attributes:
        reasons: number of rejections by reason.
        examples: "<file>:<line>: <reason>" of the first hundred.
        files: number of rejected whole files.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    files: int = 0

    @property
    def count(self) -> int:
        """Total number of rejected lines and files."""
        return self.reasons.total()

    def add(self, rejected: RejectedLine) -> None:
        """Counts one line or file."""
        self.reasons[rejected.why.reason] += 1
        self.files += not rejected.line
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(str(rejected))

    def check(self, documents: int, max_rejected: float, files: Sequence[Path], section: str) -> None:
        """Raises DataError if more records were rejected than the limit, those without text not counted.

        Args:
            documents: number of documents that were read.
            max_rejected: largest share of rejected records. Above 0, up to ten are accepted if most records are read.
            files: files that were read.
            section: config section of the files, see `DocumentReader.section`.
        """
        lost = {reason: count for reason, count in self.reasons.items() if not reason.startswith(_WITHOUT_TEXT)}
        count = sum(lost.values())
        total = documents + count
        if count <= max_rejected * total or (max_rejected and count <= min(_FEW_REJECTED, documents)):
            return
        commonest = ", ".join(f"{number:,} x {reason}" for reason, number in Counter(lost).most_common(3))
        raise DataError(
            f"{first_names(files)}: {count:,} of {total:,} records are rejected ({count / total:.1%}), more than "
            f"{section}max_rejected = {max_rejected:g} allows: {commonest}; first: {self.examples[0]}; correct them, "
            f"or go on without them with {section}max_rejected=1"
        )

    def __str__(self) -> str:
        if not self.count:
            return "no lines rejected"
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"{rejected_count(self.count, self.files)} rejected: {reasons}; first: {self.examples[0]}"


def rejected_count(rejected: int, files: int) -> str:
    """Returns the number of rejected lines and files as text.

    Args:
        rejected: number of lines and files.
        files: number of whole files among them.
    """
    counts = {"line": rejected - files, "file": files}
    return " and ".join(f"{count:,} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)
