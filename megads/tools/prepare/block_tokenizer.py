"""Tokenizes blocks into shards, in every preprocessing process.

Shards are kept when preprocessing is interrupted, and are joined into the dataset. Layout of a shard file: u32 length
of the header, the header as JSON, int32 [sequences] lengths, int32 [documents] document ends (if documents have several
sequences), tokens.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash
from tokenizers import Tokenizer

from megads.api import (
    DataError,
    Engine,
    TextSpecialTokens,
    load_tokenizer,
    parse_json,
    reason_of,
    temporary_path,
    tokenizing,
)
from megads.data.indexed.writer import COPY_BYTES
from megads.tools.prepare.blocks import Block, LoadedBlock
from megads.tools.prepare.caching_engine import CachingEngine, UnknownPattern
from megads.tools.prepare.records import Fields
from megads.tools.prepare.rejections import RejectedLine
from megads.tools.prepare.text import PIECE_CHARACTERS, Document, LastCut, TextCutter, has_prompts
from megads.tools.prepare.tokenizer import EngineMismatch, FastEngine, HuggingFaceEngine, TextEngine

_LENGTH = struct.Struct("<I")
Integers = npt.NDArray[np.int32]
_BATCH_CHARACTERS = 1 << 20
_LONG_CHARACTERS = 2 * PIECE_CHARACTERS
"""Longer texts are cut into pieces. Pieces of plain text are at most this long, so they are not cut again."""


@dataclass(frozen=True)
class TokenizeSettings:
    """The settings that, with the input, determine the token ids.

    Attributes:
        tokenizer_file: tokenizer file in the format of Hugging Face `tokenizers`.
        tokenizer_sha256: sha256 of its content.
        fields: fields of a record that hold its text; each text becomes a sequence, all of them one document.
        end_id: id of the token appended to every document; None if there is none, or if a template ends documents.
        begin_id: id of the token before every document; None if there is none, or if a template begins documents.
        dtype: token dtype, as a NumPy string.
        engine: hf or fast.
        text_special_tokens: whether text that spells a special token is ordinary text (ignore) or the token (parse).
    """

    tokenizer_file: str
    tokenizer_sha256: str
    fields: Fields
    end_id: int | None
    dtype: str
    engine: str = Engine.hf.value
    text_special_tokens: str = TextSpecialTokens.ignore.value
    begin_id: int | None = None

    @cached_property
    def settings_digest(self) -> str:
        """Hash of the settings and of the version of the tokenizer library."""
        settings = asdict(self) | {"tokenizer_file": None, "library": tokenizers.__version__, "format": 3}
        if self.begin_id is None:
            del settings["begin_id"]  # so that datasets made before this setting existed keep their identity
        return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Finished:
    """Result of one block.

    Attributes:
        documents: sequences in its shard, including partial ones.
        tokens: tokens in its shard.
        input_bytes: size of its input.
        kept: whether the shard existed already.
        restarted: whether the block was tokenized again by the reference, because the engine's ids differed.
    """

    documents: int
    tokens: int
    input_bytes: int
    kept: bool
    restarted: bool = False


class BlockTokenizer:
    """Tokenizes blocks into shards in a folder.

    Args:
        settings: settings that determine the token ids.
        folder: folder of the shards; it must exist.

    Raises:
        DataError: the tokenizer file is missing, damaged, or has changed.
    """

    def __init__(self, settings: TokenizeSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        tokenizer = _unchanged_tokenizer(settings)
        self._cutter = TextCutter(tokenizer)
        self._reference = HuggingFaceEngine(tokenizer)
        self._engine: TextEngine
        if settings.engine == Engine.fast.value:
            self._engine = FastEngine(settings.tokenizer_file, self._reference)
        else:
            self._engine = _cached(tokenizer, self._reference)

    @property
    def last_cut(self) -> LastCut:
        """Finds positions at which long texts may be cut."""
        return self._cutter.last_cut

    def __call__(self, number: int, block: Block) -> Finished:
        """Makes the shard of a block in the folder; see `make`."""
        return self.make(shard_path(self._folder, number), block)

    def make(self, path: Path, block: Block) -> Finished:
        """Makes the shard of a block, unless an earlier start has made it.

        Raises:
            DataError: the input cannot be read, the tokenizer fails on it, or the disk is full.
        """
        try:
            loaded = block.load()
        except OSError as error:
            raise DataError(f"{block}: reading failed: {reason_of(error)}; make it readable or leave it out") from error
        identity = f"{self._settings.settings_digest}-{loaded.digest()}"
        shard = _kept_shard(path, identity)
        if shard is not None:
            return Finished(shard.header.sequences, shard.header.tokens, loaded.input_bytes, kept=True)
        restarted = False
        try:
            header = self._make(path, loaded, identity, self._engine)
        except EngineMismatch:
            # The engine is not used again: the checked documents of later blocks need not reveal the same defect.
            self._engine = self._reference
            header, restarted = self._make(path, loaded, identity, self._reference), True
        return Finished(header.sequences, header.tokens, loaded.input_bytes, kept=False, restarted=restarted)

    def _make(self, path: Path, block: LoadedBlock, identity: str, engine: TextEngine) -> ShardHeader:
        built = _ShardBuilder(engine, self._settings)
        with tokenizing(self._settings.tokenizer_file):
            for row in block.rows(self._settings.fields, self._cutter.last_cut):
                for part in self._parts(row):
                    built.add(part)
            return built.write(path, block, identity)

    def _parts(self, row: Document | RejectedLine) -> Iterator[Document | RejectedLine]:
        """Yields a long document in pieces, because a tokenizer needs a hundred bytes of memory per byte of text."""
        if isinstance(row, RejectedLine) or len(row.text) <= _LONG_CHARACTERS:
            yield row
            return
        piece, begins = "", row.begins
        for following in self._cutter.pieces(row.text):
            if piece:
                yield row._replace(text=piece, continues=True, turn=False, begins=begins)
                begins = False
            piece = following
        yield row._replace(text=piece, begins=begins)


class _ShardBuilder:
    """Collects the tokens of one block, one batch of documents at a time."""

    def __init__(self, engine: TextEngine, settings: TokenizeSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._tokens = bytearray()
        self._lengths, self._ends = array("i"), array("i")
        self._rejected: list[list[object]] = []
        self._batch: list[Document] = []
        self._batch_characters = self._text_bytes = self._max_token_id = 0
        self._continues = False

    def add(self, row: Document | RejectedLine) -> None:
        """Adds one document, or a rejected line."""
        if isinstance(row, RejectedLine):
            self._rejected.append([row.source, row.line, row.why.reason, row.why.detail])
            return
        self._batch.append(row)
        self._batch_characters += len(row.text)
        if self._batch_characters >= _BATCH_CHARACTERS:
            self._tokenize_batch()

    def write(self, path: Path, block: LoadedBlock, identity: str) -> ShardHeader:
        """Writes the shard with everything that was added."""
        self._tokenize_batch()
        sizes, ends = np.array(self._lengths, np.int32), None
        if has_prompts(self._settings.fields):
            ends = np.array(self._ends, np.int32)
        header = ShardHeader(
            identity=identity,
            sequences=sizes.size,
            documents=None if ends is None else ends.size,
            tokens=len(self._tokens) // np.dtype(self._settings.dtype).itemsize,
            text_bytes=self._text_bytes,
            max_token_id=self._max_token_id,
            continues=self._continues,
            first=block.first,
            lines=block.num_lines,
            rejected=self._rejected,
            checksum=_shard_checksum(sizes, ends, self._tokens),
        )
        _write_shard(path, header, sizes, ends, self._tokens)
        return header

    def _tokenize_batch(self) -> None:
        texts = [document.text for document in self._batch]
        ids, lengths = self._engine.encode(texts)
        if self._settings.end_id is not None:
            ended = np.array([not (document.continues or document.turn) for document in self._batch], bool)
            ids = np.insert(ids, np.cumsum(lengths, dtype=np.int64)[ended], self._settings.end_id)
            lengths = [length + int(end) for length, end in zip(lengths, ended, strict=True)]
        if self._settings.begin_id is not None:
            begun = np.array([document.begins for document in self._batch], bool)
            starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
            ids = np.insert(ids, starts[begun], self._settings.begin_id)
            lengths = [length + int(begin) for length, begin in zip(lengths, begun, strict=True)]
        for document, length in zip(self._batch, lengths, strict=True):
            self._lengths.append(self._lengths.pop() + length if self._continues else length)
            self._continues = document.continues
            if not (document.continues or document.turn):
                self._ends.append(len(self._lengths))
        self._tokens += ids.astype(self._settings.dtype).tobytes()
        self._max_token_id = max(self._max_token_id, int(ids.max(initial=0)))
        self._text_bytes += sum(len(text.encode()) for text in texts)
        self._batch, self._batch_characters = [], 0


def _cached(tokenizer: Tokenizer, reference: HuggingFaceEngine) -> TextEngine:
    """Returns the reference with a cache of words, if the way in which the tokenizer splits text is supported."""
    try:
        return CachingEngine(tokenizer, reference)
    except UnknownPattern:
        return reference


def _unchanged_tokenizer(settings: TokenizeSettings) -> Tokenizer:
    """Loads the tokenizer, configured for special tokens in the text; raises DataError if its file has changed."""
    tokenizer = load_tokenizer(settings.tokenizer_file)
    if hashlib.sha256(Path(settings.tokenizer_file).read_bytes()).hexdigest() != settings.tokenizer_sha256:
        raise DataError(
            f"{settings.tokenizer_file}: changed while it was in use: start again when nothing writes to it"
        )
    tokenizer.encode_special_tokens = settings.text_special_tokens == TextSpecialTokens.ignore
    return tokenizer


@dataclass(frozen=True)
class ShardHeader:
    """Header of a shard."""

    identity: str
    """Hash of the block and of all settings; equal hashes mean equal shards."""
    sequences: int
    """Number of sequences, including partial ones at either end."""
    documents: int | None
    """Number of documents if they have several sequences; None if each sequence is a document."""
    tokens: int
    """Number of tokens."""
    text_bytes: int
    """Size of their text in UTF-8."""
    max_token_id: int
    """Largest token id; 0 if there are no tokens."""
    continues: bool
    """Whether the last document continues in the next shard."""
    first: bool
    """Whether line numbers of rejections start at the beginning of a file; if not, at the end of the previous shard."""
    lines: int
    """Number of input lines."""
    rejected: list[list[Any]]
    """Source, line, reason and detail of every rejected line."""
    checksum: str
    """XXH3 of lengths and tokens."""


@dataclass(frozen=True)
class DatasetShard:
    """An open shard file.

    Attributes:
        path: the file.
        header: its header.
        sizes: int32 [sequences], length of each sequence in tokens.
        ends: int32 [documents], number of sequences up to the end of each document; None if each sequence is a
            document.
    """

    path: Path
    header: ShardHeader
    sizes: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32] | None
    token_offset: int

    def tokens(self) -> Iterator[bytes]:
        """Yields the tokens in pieces.

        Raises:
            DataError: the checksum does not match; the file is removed, so that the next start makes it again.
        """
        digest = xxhash.xxh3_64(self.sizes.tobytes())
        if self.ends is not None:
            digest.update(self.ends.tobytes())
        with self.path.open("rb") as file:
            file.seek(self.token_offset)
            while piece := file.read(COPY_BYTES):
                digest.update(piece)
                yield piece
        if digest.hexdigest() != self.header.checksum:
            self.path.unlink()
            raise DataError(
                f"{self.path}: its checksum is {digest.hexdigest()}, {self.header.checksum} was written: the disk lost "
                "bytes. It is removed; give the same command again, which makes this part anew"
            )


def shard_path(folder: Path, number: int, piece: int | None = None) -> Path:
    """Returns the shard file of the block `number`, or of piece `piece` of the unit `number`."""
    return folder / (f"{number:08d}.shard" if piece is None else f"{number:08d}-{piece:06d}.shard")


def _write_shard(
    path: Path, header: ShardHeader, sizes: Integers, ends: Integers | None, tokens: bytes | bytearray
) -> None:
    """Writes a shard, which appears under its name only when complete.

    The file is not synced to disk; its checksum detects losses after a power failure.

    Raises:
        DataError: the file cannot be written.
    """
    content = json.dumps(asdict(header)).encode()
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            counts = sizes.tobytes() + (b"" if ends is None else ends.tobytes())
            for part in (_LENGTH.pack(len(content)), content, counts, tokens):
                file.write(part)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{path}: writing failed: {reason_of(error)}; free space there and give the same command again: what is "
            "finished is kept"
        ) from error


def open_shard(path: Path) -> DatasetShard:
    """Reads a shard's header and lengths.

    Raises:
        ValueError: the file is not a shard, or is truncated.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) != _LENGTH.size:
            raise ValueError("truncated")
        try:
            header = ShardHeader(**parse_json(file.read(_LENGTH.unpack(start)[0])))
        except TypeError as error:
            raise ValueError(str(error)) from error
        sizes, ends = np.frombuffer(file.read(4 * header.sequences), np.int32), None
        if header.documents is not None:
            ends = np.frombuffer(file.read(4 * header.documents), np.int32)
        return DatasetShard(path, header, sizes, ends, file.tell())


def _kept_shard(path: Path, identity: str) -> DatasetShard | None:
    """Returns the shard of an earlier start if it is complete and has the same identity; else None."""
    try:
        shard = open_shard(path)
        if shard.header.identity != identity or shard.sizes.size != shard.header.sequences:
            return None
        if shard.ends is not None and shard.ends.size != shard.header.documents:
            return None
        for _ in shard.tokens():
            pass
    except (OSError, ValueError, DataError):
        return None
    return shard


def _shard_checksum(sizes: Integers, ends: Integers | None, tokens: bytes | bytearray) -> str:
    """Returns the checksum for a shard's header."""
    digest = xxhash.xxh3_64(sizes.tobytes())
    if ends is not None:
        digest.update(ends.tobytes())
    digest.update(tokens)
    return str(digest.hexdigest())
