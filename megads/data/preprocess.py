"""From raw text to an indexed dataset, in constant memory."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megads.data.carried_tokenizer import carried_path, write_carried
from megads.data.config import PreprocessConfig
from megads.data.indexed import IndexedDatasetWriter, bin_path, idx_path, token_dtype
from megads.data.progress import ByteProgress
from megads.data.sidecar import Sidecar, sidecar_path, write_sidecar
from megads.data.text import Document, DocumentReader
from megads.data.tokenizer import embedding_rows, load_tokenizer
from megads.errors import ConfigError

BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class PreprocessReport:
    """What `preprocess` made.

    Attributes:
        output: prefix of the dataset.
        sidecar: the numbers, as written beside it.
        seconds: how long it took.
    """

    output: str
    sidecar: Sidecar
    seconds: float

    def __str__(self) -> str:
        made = self.sidecar
        lines = [
            f"{self.output}: {made.documents:,} documents, {made.tokens:,} tokens, {made.text_bytes / 1e6:,.1f} MB "
            f"of text ({made.text_bytes / made.tokens:.2f} bytes a token), largest token {made.max_token_id}",
            f"{self.seconds:.1f} s, {made.tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
        ]
        if made.rejected_lines:
            lines.append(f"{made.rejected_lines} lines rejected, the first of them:")
            lines += [f"  {example}" for example in made.rejected_examples[:5]]
        return "\n".join(lines)


def preprocess(config: PreprocessConfig) -> PreprocessReport:
    """Tokenizes documents into `<output>.bin`, `<output>.idx` and the sidecar `<output>.json`.

    A copy of the tokenizer goes with them, as `<output>.tokenizer.json`: who has the dataset can read it.

    Args:
        config: input, tokenizer and output.

    Returns:
        What was made.

    Raises:
        ConfigError: the output exists, or the end-of-document token is not in the tokenizer.
        DataError: no documents, a damaged input or tokenizer file, or a full disk. Nothing is left behind then.
    """
    start_s = time.monotonic()
    reader = DocumentReader(config.input, config.text_field)
    _refuse_to_overwrite(config, reader.files)
    sidecar = tokenize(reader, config.tokenizer, config.output, config.end_of_document, "end_of_document")
    return PreprocessReport(config.output, sidecar, time.monotonic() - start_s)


def tokenize(
    reader: DocumentReader, tokenizer_file: str, output: str, end_of_document: str | None, end_key: str
) -> Sidecar:
    """Tokenizes documents, in constant memory, into a dataset and its sidecar.

    Text that spells the end-of-document token is encoded as ordinary text, so that only real ends are marked.

    Args:
        reader: the documents.
        tokenizer_file: in the format of Hugging Face `tokenizers`.
        output: prefix of the dataset; one that is there is replaced.
        end_of_document: token appended to every document, or None.
        end_key: the config key it comes from, for messages.

    Returns:
        The sidecar, as written.

    Raises:
        ConfigError: the end-of-document token is not in the tokenizer.
        DataError: no documents, a damaged input or tokenizer file, or a full disk. Nothing is left behind then.
    """
    tokenizer = load_tokenizer(tokenizer_file)
    tokenizer_text = Path(tokenizer_file).read_bytes()
    end_id = end_of_document_id(tokenizer, tokenizer_file, end_of_document, end_key)
    tokenizer.encode_special_tokens = True
    vocab_size = embedding_rows(tokenizer)
    with IndexedDatasetWriter(output, token_dtype(vocab_size)) as writer:
        text_bytes, max_token_id = _append_documents(reader, tokenizer, end_id, writer)
        # A dataset without a sidecar is valid, one with another's is not: the old one goes before the new data come.
        sidecar_path(output).unlink(missing_ok=True)
        if carried_path(output).resolve() != Path(tokenizer_file).resolve():
            carried_path(output).unlink(missing_ok=True)
    write_carried(output, tokenizer_text)
    sidecar = Sidecar(
        tokenizer_sha256=hashlib.sha256(tokenizer_text).hexdigest(),
        vocab_size=vocab_size,
        max_token_id=max_token_id,
        end_of_document_id=end_id,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        text_bytes=text_bytes,
        rejected_lines=reader.rejected.count,
        rejected_reasons=dict(reader.rejected.reasons),
        rejected_examples=reader.rejected.examples,
        input_files=[str(path) for path in reader.files],
    )
    write_sidecar(output, sidecar)
    return sidecar


def _append_documents(
    reader: DocumentReader, tokenizer: Tokenizer, end_id: int | None, writer: IndexedDatasetWriter
) -> tuple[int, int]:
    """Tokenizes all documents into the writer, showing progress; returns bytes of text and the largest token."""
    text_bytes, max_token_id = 0, 0
    with ByteProgress("tokenizing", reader.total_bytes) as progress:
        for batch in _batches(reader):
            texts = [document.text for document in batch]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                end = [] if end_id is None or document.continues else [end_id]
                ids = np.asarray([*encoding.ids, *end], dtype=np.int64)
                writer.append(ids, continues=document.continues)
                max_token_id = max(max_token_id, int(ids.max(initial=0)))
            text_bytes += sum(len(text.encode()) for text in texts)
            progress.update(reader.bytes_read, f"{writer.num_tokens:,} tokens")
    return text_bytes, max_token_id


def _refuse_to_overwrite(config: PreprocessConfig, files: list[Path]) -> None:
    written = (bin_path(config.output), idx_path(config.output), sidecar_path(config.output))
    for path in (*written, carried_path(config.output)):
        if path.resolve() in [file.resolve() for file in files]:
            raise ConfigError(f"output = {config.output}: {path} is an input and would be lost; choose another output")
        if path.exists() and not config.overwrite:
            raise ConfigError(f"output = {config.output}: {path} exists; choose another output or give overwrite=true")


def end_of_document_id(tokenizer: Tokenizer, tokenizer_file: str, token: str | None, key: str) -> int | None:
    """Returns the id of the token that ends documents, None where none does.

    Raises:
        ConfigError: the tokenizer does not have it.
    """
    if token is None:
        return None
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        special = [added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special]
        has = f"its special tokens are {', '.join(special[:8])}" if special else "it has no special tokens"
        raise ConfigError(
            f"{key} = {token}: not a token of {tokenizer_file} ({has}); give one that it has, or {key}=null to mark no "
            "ends"
        )
    return found


def _batches(documents: DocumentReader) -> Iterator[list[Document]]:
    """Yields documents in batches of about as many characters, however long each is."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
