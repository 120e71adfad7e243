"""`megads dataset`: merges, splits, shows, counts and checks indexed datasets."""

from __future__ import annotations

from collections.abc import Callable

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.dataset.config import DatasetAction, DatasetActionConfig


def run(config: DatasetActionConfig, _invocation: Invocation) -> int:
    """Runs the action and prints its result."""
    config.check()
    _RUN[config.action](config)
    return EXIT_OK


def _merge(config: DatasetActionConfig) -> None:
    from megads.tools.dataset.actions import merge

    assert config.output is not None
    made = merge(config.prefixes, config.output, config.overwrite)
    print(f"{made.prefix}: {made.num_documents:,} documents, {made.num_tokens:,} tokens")


def _split(config: DatasetActionConfig) -> None:
    from megads.tools.dataset.actions import split

    assert config.output is not None
    for made in split(config.prefixes[0], config.output, config.shares, config.overwrite).values():
        print(f"{made.prefix}: {made.num_documents:,} documents, {made.num_tokens:,} tokens")


def _inspect(config: DatasetActionConfig) -> None:
    from megads.tools.dataset.actions import read_decoded

    for document in read_decoded(
        config.prefixes[0], config.first, config.count, config.max_characters, config.tokenizer
    ):
        print(f"=== document {document.number}: {document.tokens:,} tokens")
        print(document.text + (" ..." if document.cut else ""))


def _stats(config: DatasetActionConfig) -> None:
    from megads.tools.dataset.actions import length_statistics
    from megads.tools.inspect.dataset_lengths import print_lengths, write_picture

    counted = [length_statistics(prefix) for prefix in config.prefixes]
    for statistics in counted:
        print_lengths(statistics)
    if config.output is not None:
        write_picture(counted, config.output)
        print(f"picture: {config.output}")


def _check(config: DatasetActionConfig) -> None:
    from megads.tools.dataset.actions import check

    for prefix in config.prefixes:
        found = check(prefix)
        held = "as recorded" if found.checksums_held else "none recorded: only lengths, offsets and ids were checked"
        empty = f", {found.empty_documents:,} of them empty" if found.empty_documents else ""
        print(f"{prefix}: sound: {found.documents:,} documents{empty}, {found.tokens:,} tokens")
        print(f"  XXH3 of .bin {found.bin_checksum}, of .idx {found.idx_checksum} ({held})")


_RUN: dict[DatasetAction, Callable[[DatasetActionConfig], None]] = {
    DatasetAction.merge: _merge,
    DatasetAction.split: _split,
    DatasetAction.inspect: _inspect,
    DatasetAction.stats: _stats,
    DatasetAction.check: _check,
}

VERB = Verb(
    "dataset", DatasetActionConfig, run, flags={action.value: f"action={action.name}" for action in DatasetAction}
)
