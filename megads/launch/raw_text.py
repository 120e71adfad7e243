"""Datasets made of a run's text (data.raw), by `megads.tools.prepare`; a run with data.train needs no such tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from megads.config.root import RootConfig
from megads.data.indexed.sidecar import Sidecar
from megads.errors import DataError
from megads.monitor.console import Console
from megads.runtime.optional_tools import require_tool


class PreparedText(Protocol):
    """A dataset that was made of data.raw; str() describes it."""

    @property
    def prefix(self) -> Path:
        """Prefix of the dataset, for data.train."""
        ...

    @property
    def sidecar(self) -> Sidecar: ...


class TextPreparation(Protocol):
    """What to prepare from data.raw, and where; str() describes it."""

    @property
    def folder(self) -> Path:
        """Folder of the dataset, which may not exist yet."""
        ...

    @property
    def prefix(self) -> Path:
        """Prefix of the dataset, for data.train."""
        ...

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer file, for tokenizer.path."""
        ...

    @property
    def tokenizer_content(self) -> bytes | None:
        """Content of a given tokenizer file; None trains a tokenizer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of a given tokenizer, or the maximum of one to train."""
        ...

    @property
    def text_bytes(self) -> int:
        """Approximate size of the text, uncompressed."""
        ...

    def find(self) -> PreparedText | None:
        """Returns the dataset that an earlier start made, None if there is none; raises DataError if it is damaged."""
        ...

    def make(self, print_line: Callable[[str], None]) -> PreparedText:
        """Makes the dataset, unless another process does so meanwhile.

        Raises:
            ConfigError: the folder cannot be written to.
            DataError: the text cannot be read, has no documents, or changed meanwhile.
        """
        ...


def plan_preparation(config: RootConfig, cache_dir: Path) -> TextPreparation:
    """Finds the text of data.raw.

    Args:
        config: config of the run with data.raw set.
        cache_dir: folder of prepared text.

    Raises:
        ConfigError: the tokenizer's settings do not fit it, or the tool is not installed.
        DataError: no files match, a file cannot be read, or a given tokenizer file is invalid.
    """
    tool = require_tool("prepare.preparation", "data.raw")
    remember = not config.run.dry_run
    planned = tool.plan_preparation(
        config.data, config.tokenizer, config.model.vocab_size, cache_dir, remember=remember
    )
    return cast(TextPreparation, planned)


def find_or_make(preparation: TextPreparation, console: Console) -> tuple[PreparedText, bool]:
    """Returns the prepared text, and whether an earlier start made it; errors as in `TextPreparation.make`."""
    try:
        found = preparation.find()
    except DataError:
        # `make` checks again while it holds the lock.
        found = None
    if found is not None:
        return found, True
    console.print_line(f"data: making {preparation.folder} from {preparation}")
    return preparation.make(lambda line: console.print_line(f"data: {line}", "warning")), False
