"""Byte-level BPE tokenizers in the format of Hugging Face `tokenizers`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megads.data.atomic_file import atomic_writer
from megads.data.config import TokenizerConfig
from megads.data.progress import ByteProgress
from megads.data.text import DocumentReader
from megads.errors import ConfigError, DataError


def train_tokenizer(config: TokenizerConfig) -> None:
    """Learns a byte-level BPE vocabulary and writes the tokenizer file.

    The 256 bytes are always in it, so every text can be encoded and decodes to itself. The end-of-document token has
    id 0. The same input gives the same file, byte for byte.

    Args:
        config: input, output and size.

    Raises:
        ConfigError: vocab_size has no room for the bytes.
        DataError: the input has no documents, or the output cannot be written.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 1
    if config.vocab_size < smallest:
        raise ConfigError(
            f"vocab_size = {config.vocab_size}: must be at least {smallest}, 256 bytes and the end-of-document token"
        )
    reader = DocumentReader(config.input, config.text_field)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    on_terminal = sys.stderr.isatty()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[config.end_of_document],
        # Sorted: the order of the alphabet is the order of its ids.
        initial_alphabet=sorted(alphabet),
        show_progress=on_terminal,
    )
    tokenizer.train_from_iterator(_texts(reader, quiet=on_terminal), trainer)
    output = Path(config.output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(output) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another output") from error
    learnt = tokenizer.get_vocab_size()
    short = "" if learnt == config.vocab_size else f" (the text has no more pairs; {config.vocab_size} were asked for)"
    sys.stdout.write(f"{output}: {learnt} tokens{short}; {reader.rejected}\n")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer file.

    Args:
        path: a file in the format of Hugging Face `tokenizers`.

    Returns:
        The tokenizer, with truncation and padding off: either would change documents silently.

    Raises:
        DataError: the file is missing or is no tokenizer.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such tokenizer file; make one with `megads tokenizer input=<files> output={path}`")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise DataError(
            f"{path}: is not a tokenizer file of Hugging Face `tokenizers`, or is damaged: {error}; "
            "copy it again or make it anew with `megads tokenizer`"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(reader: DocumentReader, quiet: bool) -> Iterator[str]:
    """Yields the texts, with progress unless the trainer shows its own."""
    with ByteProgress("reading", reader.total_bytes if not quiet else 0) as progress:
        for document in reader:
            yield document.text
            if not quiet:
                progress.update(reader.bytes_read)
