"""Trains byte-level BPE tokenizers, written in the format of Hugging Face `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megads.data.config import check_text
from megads.data.prepare.config import TokenizerConfig, check_learning
from megads.data.prepare.text import DocumentReader, Rejections, converted_text
from megads.errors import DataError
from megads.runtime.files import atomic_writer
from megads.runtime.progress import Progress


@dataclass(frozen=True)
class TokenizerReport:
    """Result of `train_tokenizer`.

    Attributes:
        output: the tokenizer file.
        asked: requested vocabulary size.
        learnt: actual vocabulary size.
        rejected: lines and files without a document.
        said: descriptions of skipped files and of converted files.
    """

    output: str
    asked: int
    learnt: int
    rejected: Rejections
    said: tuple[str, ...] = ()

    def __str__(self) -> str:
        short = "" if self.learnt == self.asked else f" (the text has no more pairs; {self.asked} were asked for)"
        return f"{self.output}: {self.learnt} tokens{short}; {'; '.join((*self.said, str(self.rejected)))}"


def train_tokenizer(config: TokenizerConfig) -> TokenizerReport:
    """Trains a byte-level BPE tokenizer and writes the tokenizer file.

    Args:
        config: input, output and size.

    Returns:
        A report.

    Raises:
        ConfigError: vocab_size is too small for the bytes, or too large.
        DataError: the input has no documents, or the output cannot be written.
    """
    check_learning("", config.vocab_size, config.min_frequency)
    check_text("", config.extensions, config.encoding)
    reader = DocumentReader(config.input, (config.text_field,), extensions=config.extensions, encoding=config.encoding)
    learnt = learn_tokenizer(
        reader, Path(config.output), config.vocab_size, config.min_frequency, config.end_of_document
    )
    said = tuple(text for text in (reader.passed_over, converted_text(reader.converted)) if text)
    return TokenizerReport(config.output, config.vocab_size, learnt, reader.rejected, said)


def learn_tokenizer(
    reader: DocumentReader,
    output: Path,
    vocab_size: int,
    min_frequency: int,
    end_of_document: str | None,
    every: int = 1,
) -> int:
    """Trains a byte-level BPE tokenizer on documents and writes the tokenizer file.

    The 256 bytes are always in the vocabulary, so every text can be encoded and decodes to itself. The end-of-document
    token has id 0. The same documents give the same file, byte for byte.

    Args:
        reader: the documents.
        output: the file to write.
        vocab_size: vocabulary size, including the special token; at least SMALLEST_VOCABULARY.
        min_frequency: pairs seen less often are not merged.
        end_of_document: the special token, or None for none.
        every: trains on one document in this many.

    Returns:
        The actual vocabulary size, which is below vocab_size if the text has no more pairs.

    Raises:
        DataError: there are no documents, or the output cannot be written.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[] if end_of_document is None else [end_of_document],
        # Sorted, because the ids follow the order of the alphabet.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with Progress("training the tokenizer", reader.total_bytes) as progress:
        tokenizer.train_from_iterator(_texts(reader, every, progress), trainer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(output) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another output") from error
    learnt: int = tokenizer.get_vocab_size()
    return learnt


def _texts(reader: DocumentReader, every: int, progress: Progress) -> Iterator[str]:
    """Yields the texts to train on, and updates the progress."""
    for number, document in enumerate(reader):
        if number % every == 0:
            yield document.text
        progress.update(reader.bytes_read)
