"""Settings of `megads dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from megads.api import ConfigError


class DatasetAction(Enum):
    """What `megads dataset` does."""

    merge = "merge"
    split = "split"
    inspect = "inspect"
    stats = "stats"
    check = "check"


@dataclass
class DatasetActionConfig:
    """`megads dataset`: merges, splits, inspects, counts and checks indexed datasets."""

    action: DatasetAction = MISSING
    """Action; its name alone is enough: megads dataset merge."""
    input: Any = MISSING
    """Prefix of a dataset, or a list of them: <input>.bin and <input>.idx."""
    output: str | None = None
    """Prefix of the dataset to write (merge), of <output>-<part> (split), or a .png file for the histogram (stats)."""
    parts: Any = None
    """Names of the parts of a split and their shares of the documents, in order; null is {train: 0.98, valid: 0.02}."""
    first: int = 0
    """First document to inspect."""
    count: int = 5
    """Number of documents to inspect."""
    max_characters: int = 500
    """Characters to show of each inspected document."""
    tokenizer: str | None = None
    """Tokenizer file for decoding; null uses the one beside the dataset."""
    overwrite: bool = False
    """Replace existing datasets."""

    @property
    def prefixes(self) -> list[str]:
        """The prefixes of `input` as a list."""
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts of a split, by name."""
        return {"train": 0.98, "valid": 0.02} if self.parts is None else self.parts

    def check(self) -> None:
        """Raises ConfigError on a missing output, on too many inputs, and on invalid parts or document numbers."""
        if not isinstance(self.input, str | list) or not self.input or not all(isinstance(x, str) for x in self.input):
            raise ConfigError(f"input = {self.input!r}: want the prefix of a dataset, or a list, as in input='[a, b]'")
        if self.action in (DatasetAction.merge, DatasetAction.split) and not self.output:
            raise ConfigError(f"{self.action.value} needs output=<prefix>")
        if self.action in (DatasetAction.split, DatasetAction.inspect) and len(self.prefixes) != 1:
            raise ConfigError(f"{self.action.value} takes one dataset, input names {len(self.prefixes)}")
        given = self.shares.values() if isinstance(self.shares, dict) else [None]
        if not self.shares or not all(isinstance(share, int | float) and share > 0 for share in given):
            raise ConfigError(
                f"parts = {self.shares}: want names with shares above 0, as in parts='{{train: 9, test: 1}}'"
            )
        if self.first < 0 or self.count < 1 or self.max_characters < 1:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}, max_characters = {self.max_characters}: want a document "
                "from 0 on, and at least one of the others"
            )
        if self.action is DatasetAction.stats and self.output is not None and not self.output.endswith(".png"):
            raise ConfigError(f"output = {self.output}: the histogram of stats is a .png file: give output=<name>.png")
