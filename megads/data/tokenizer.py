"""Byte-level BPE tokenizers in the format of Hugging Face `tokenizers`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megads.data.config import TokenizerConfig, check_learning
from megads.data.progress import ByteProgress
from megads.data.text import DocumentReader, Rejections
from megads.errors import DataError
from megads.runtime.files import atomic_writer

_PROBE = "A text with 1 number,\n\ta tab, and naïve 漢字 🚀."


@dataclass(frozen=True)
class TokenizerReport:
    """What `train_tokenizer` made.

    Attributes:
        output: the file.
        asked: the size asked for.
        learnt: the size it has.
        rejected: lines that gave no document.
    """

    output: str
    asked: int
    learnt: int
    rejected: Rejections

    def __str__(self) -> str:
        short = "" if self.learnt == self.asked else f" (the text has no more pairs; {self.asked} were asked for)"
        return f"{self.output}: {self.learnt} tokens{short}; {self.rejected}"


def train_tokenizer(config: TokenizerConfig) -> TokenizerReport:
    """Learns a byte-level BPE vocabulary and writes the tokenizer file.

    Args:
        config: input, output and size.

    Returns:
        What was made.

    Raises:
        ConfigError: vocab_size has no room for the bytes, or more than a vocabulary can have.
        DataError: the input has no documents, or the output cannot be written.
    """
    check_learning("", config.vocab_size, config.min_frequency)
    reader = DocumentReader(config.input, (config.text_field,))
    learnt = learn_tokenizer(
        reader, Path(config.output), config.vocab_size, config.min_frequency, config.end_of_document
    )
    return TokenizerReport(config.output, config.vocab_size, learnt, reader.rejected)


def learn_tokenizer(
    reader: DocumentReader,
    output: Path,
    vocab_size: int,
    min_frequency: int,
    end_of_document: str | None,
    every: int = 1,
) -> int:
    """Learns a vocabulary from documents and writes the tokenizer file.

    The 256 bytes are always in it, so every text can be encoded and decodes to itself. The end-of-document token has
    id 0. The same documents give the same file, byte for byte.

    Args:
        reader: the documents.
        output: the file to write.
        vocab_size: tokens to learn, the special one included; at least SMALLEST_VOCABULARY.
        min_frequency: pairs seen less often are not merged.
        end_of_document: the special token, or None for none.
        every: learns from one document in so many.

    Returns:
        Tokens learnt, fewer than vocab_size where the text has no more pairs.

    Raises:
        DataError: there are no documents, or the output cannot be written.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    on_terminal = sys.stderr.isatty()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[] if end_of_document is None else [end_of_document],
        # Sorted: the order of the alphabet is the order of its ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=on_terminal,
    )
    tokenizer.train_from_iterator(_texts(reader, every, quiet=on_terminal), trainer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(output) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another output") from error
    learnt: int = tokenizer.get_vocab_size()
    return learnt


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Returns the rows that an embedding needs for a tokenizer: its largest id + 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer file.

    Args:
        path: a file in the format of Hugging Face `tokenizers`.

    Returns:
        The tokenizer, with truncation and padding off: either would change documents silently.

    Raises:
        DataError: the file is missing, is no tokenizer, or one that fails on any text.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such tokenizer file; make one with `megads tokenizer input=<files> output={path}`")
    with tokenizing(path):
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Much of what is wrong with a file shows at its first use only.
        tokenizer.decode(tokenizer.encode(_PROBE).ids)
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{path}: the tokenizer has no tokens; make one with `megads tokenizer`")
    return tokenizer


@contextmanager
def tokenizing(path: str | Path) -> Iterator[None]:
    """Names the file of a tokenizer that cannot be read, or fails on a text.

    A pattern that takes too many steps on some text, or a part that refers to nothing, makes the library panic. A panic
    is a BaseException, of a class that cannot be imported, and would pass every handler.

    Args:
        path: the tokenizer file.

    Raises:
        DataError: in place of what the library raises.
    """
    try:
        yield
    except BaseException as error:
        # The library raises nothing more special than Exception itself.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: is not a tokenizer file of Hugging Face `tokenizers`, or is damaged: {error}; "
            "copy it again or make it anew with `megads tokenizer`"
        ) from error


def _texts(reader: DocumentReader, every: int, quiet: bool) -> Iterator[str]:
    """Yields the texts, with progress unless the trainer shows its own."""
    with ByteProgress("reading", reader.total_bytes if not quiet else 0) as progress:
        for number, document in enumerate(reader):
            if number % every == 0:
                yield document.text
            if not quiet:
                progress.update(reader.bytes_read)
