"""Tokenizes documents into a dataset: worker processes turn blocks of the input into shards, which are then joined."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from megads.api import (
    ConfigError,
    DataError,
    Engine,
    IndexedDatasetAppender,
    Progress,
    Sidecar,
    TextSpecialTokens,
    UnhealthyNode,
    available_cores,
    carried_path,
    child_environment,
    embedding_rows,
    load_tokenizer,
    reason_of,
    sidecar_path,
    token_dtype,
    write_carried,
    write_sidecar,
    written_checksums,
)
from megads.data.indexed.verified_once import file_state, require_unchanged
from megads.runtime.environment import tokenize_on_one_thread
from megads.tools.prepare.block_tokenizer import (
    BlockTokenizer,
    DatasetShard,
    TokenizeSettings,
    open_shard,
    shard_path,
)
from megads.tools.prepare.blocks import (
    STDIN,
    Block,
    block_bytes_of,
    blocks_of,
    first_texts,
    stdin_blocks,
    texts_of_places,
)
from megads.tools.prepare.chat import Conversations
from megads.tools.prepare.records import Fields, NoDocument
from megads.tools.prepare.rejections import RejectedLine, Rejections
from megads.tools.prepare.text import DocumentReader, TextCutter, no_documents
from megads.tools.prepare.tokenizer import choose_engine

Item = TypeVar("Item")
Result = TypeVar("Result")
# Queued items per worker: enough to keep it busy, few enough for memory.
_AHEAD = 2
# Total size of the files up to which no worker processes are started.
_SMALL_BYTES = 1 << 19


class Tokenizing:
    """Tokenizes documents into a dataset with a sidecar.

    Args:
        tokenizer_file: tokenizer file in the format of Hugging Face `tokenizers`.
        output: prefix of the dataset; an existing one is replaced.
        end_of_document: token appended to every document, or None.
        end_key: config key of `end_of_document`, for messages.
        text_special_tokens: how text that spells a special token is tokenized.
        max_rejected: largest share of rejected records, see `Rejections.check`.
        begin_of_document: token before every document, or None.

    Raises:
        ConfigError: one of the two tokens is not in the tokenizer.
        DataError: the tokenizer file is damaged.
    """

    def __init__(
        self,
        tokenizer_file: str,
        output: str,
        end_of_document: str | None,
        end_key: str,
        text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore,
        max_rejected: float = 1.0,
        begin_of_document: str | None = None,
    ) -> None:
        tokenizer = load_tokenizer(tokenizer_file)
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = text_special_tokens is TextSpecialTokens.ignore
        self._text_special_tokens = text_special_tokens.value
        self._tokenizer_file = tokenizer_file
        self._tokenizer_text = Path(tokenizer_file).read_bytes()
        # The other keys are in the same section.
        section = end_key.removesuffix("end_of_document")
        self._end_id = document_token_id(tokenizer, tokenizer_file, end_of_document, end_key)
        begin_key = f"{section}begin_of_document"
        self._begin_id = document_token_id(tokenizer, tokenizer_file, begin_of_document, begin_key)
        self._vocab_size = embedding_rows(tokenizer)
        self._dtype = token_dtype(self._vocab_size)
        self.output = output
        self._max_rejected = max_rejected
        self._engine_key = f"{section}engine"
        self.kept_shards = 0
        self.join_seconds = 0.0
        self.engine = ""

    def run(
        self, source: DocumentReader | None, fields: Fields, workers: int | None, engine: Engine = Engine.auto
    ) -> Sidecar:
        """Tokenizes documents.

        Args:
            source: the files; None is JSON lines from the standard input.
            fields: fields of a record that hold its text. Conversations keep the special tokens that their template
                writes, and get neither of the two tokens.
            workers: number of processes; None is one per core.
            engine: tokenizer implementation.

        Returns:
            The sidecar, as written.

        Raises:
            DataError: no documents, a damaged input, or a full disk. Finished parts are kept, except if there are no
                documents.
            UnhealthyNode: a worker process died.
        """
        with Progress("tokenizing", source.total_bytes if source else 0) as progress:
            return self._run(source, fields, workers, engine, progress)

    def _run(
        self, source: DocumentReader | None, fields: Fields, workers: int | None, engine: Engine, progress: Progress
    ) -> Sidecar:
        states = {path: file_state(path) for path in source.files} if source else {}
        # Before the first block is read, because the block reader keeps the decoded text of a long row.
        sample = texts_of_places(source, fields) if source and engine is not Engine.hf else []
        blocks = self.blocks(source)
        first = list(islice(blocks, 2))
        if engine is not Engine.hf:
            sample += first_texts(first, fields)
        settings = self.settings(fields, engine, sample)
        with parts_folder(self.output) as folder:
            make = functools.partial(BlockTokenizer, settings, folder)
            # One block, or small files, do not justify worker processes.
            small = workers is None and source is not None and source.total_bytes < _SMALL_BYTES
            workers = 1 if small or len(first) < 2 else workers or available_cores()
            num_shards, num_tokens = self._tokenize(make, chain(first, blocks), progress, workers)
            for path, state in states.items():
                require_unchanged(path, state)
            shards = (open_shard(shard_path(folder, number)) for number in range(num_shards))
            return self.join(shards, num_tokens, source, settings, source.converted if source else {})

    def blocks(self, source: DocumentReader | None) -> Iterator[Block]:
        """Yields the blocks of the files, or of the standard input."""
        if source is None:
            return stdin_blocks()
        return blocks_of(source, block_bytes_of(source), TextCutter(self._tokenizer).last_cut)

    def settings(self, fields: Fields, engine: Engine, sample: Sequence[str]) -> TokenizeSettings:
        """Chooses the engine, and returns the settings that determine the token ids.

        Args:
            fields: fields of a record that hold its text.
            engine: the engine that the user requested.
            sample: texts of the corpus on which the engine is checked.

        Raises:
            ConfigError: `fast` was requested and cannot be used.
        """
        if isinstance(fields, Conversations):
            self._text_special_tokens = TextSpecialTokens.parse.value
            self._tokenizer.encode_special_tokens = False
        self.engine = choose_engine(engine, self._tokenizer_file, self._tokenizer, sample, self._engine_key).value
        templated = isinstance(fields, Conversations)
        return TokenizeSettings(
            os.path.realpath(self._tokenizer_file),
            hashlib.sha256(self._tokenizer_text).hexdigest(),
            fields,
            None if templated else self._end_id,
            self._dtype.str,
            self.engine,
            self._text_special_tokens,
            None if templated else self._begin_id,
        )

    def _tokenize(
        self, make: Callable[[], BlockTokenizer], blocks: Iterator[Block], progress: Progress, workers: int
    ) -> tuple[int, int]:
        """Makes all shards; returns the number of shards and the number of tokens."""
        shards = tokens = done_bytes = restarted = 0
        for one in map_items(make, blocks, workers):
            shards += 1
            self.kept_shards += one.kept
            restarted += one.restarted
            tokens += one.tokens
            done_bytes += one.input_bytes
            progress.update(done_bytes, f"{tokens:,} tokens")
        self.count_restarted_shards(restarted, shards)
        return shards, tokens

    def count_restarted_shards(self, restarted: int, shards: int) -> None:
        """Records how many of the shards were tokenized again with the reference because of an id mismatch."""
        if restarted:
            made = "by hf" if self.engine == Engine.fast.value else "without its cache of words,"
            self.engine = f"{self.engine}, {restarted} of {shards} parts {made} after ids that differ"

    def join(
        self,
        shards: Iterable[DatasetShard],
        num_tokens: int,
        source: DocumentReader | None,
        settings: TokenizeSettings,
        converted: dict[str, str],
        input_files: Sequence[str] | None = None,
    ) -> Sidecar:
        """Joins shards into the dataset, which appears only when complete, and removes the folder of its parts.

        Args:
            shards: the shards, in document order.
            num_tokens: total number of tokens.
            source: the files; None is the standard input, or documents of another program.
            settings: settings with which the shards were made.
            converted: encodings of the files that are not UTF-8.
            input_files: names of the inputs, if there is no source.

        Raises:
            DataError: no documents, too many rejected records, a damaged shard, or a full disk.
        """
        start_s = time.monotonic()
        files = source.files if source else [Path(STDIN)]
        section = source.section if source else ""
        rejected = Rejections()
        progress = Progress("joining", num_tokens * self._dtype.itemsize)
        with IndexedDatasetAppender(self.output, self._dtype) as writer, progress:
            text_bytes, max_token_id = _copy(shards, writer, rejected, progress)
            if not writer.num_documents:
                # The parts are of no use for another start.
                remove_parts(self.output)
                raise no_documents(files, rejected, settings.fields, section)
            # The parts are kept: with a higher limit the same command joins them.
            rejected.check(writer.num_documents, self._max_rejected, files, section)
            self._remove_replaced_files(settings)
        sidecar = Sidecar(
            tokenizer_sha256=settings.tokenizer_sha256,
            vocab_size=self._vocab_size,
            max_token_id=max_token_id,
            end_of_document_id=self._end_id,
            begin_of_document_id=settings.begin_id,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=text_bytes,
            rejected_lines=rejected.count,
            rejected_reasons=dict(rejected.reasons),
            rejected_examples=rejected.examples,
            input_files=list(map(str, files)) if input_files is None else list(input_files),
            bin_checksum=writer.bin_checksum,
            **written_checksums(self.output),
            text_special_tokens=settings.text_special_tokens,
            template_tokens=settings.fields.template.tokens if isinstance(settings.fields, Conversations) else {},
            rejected_files=rejected.files,
            converted_files=converted,
            input_identity=input_identity(settings, source) if source else None,
        )
        self._write_carried(settings)
        write_sidecar(self.output, sidecar)
        remove_parts(self.output)
        self.join_seconds = time.monotonic() - start_s
        return sidecar

    def _remove_replaced_files(self, settings: TokenizeSettings) -> None:
        """Removes the sidecar and the tokenizer of a dataset that is about to be replaced.

        A dataset without a sidecar is valid, one with the sidecar of another dataset is not, so the old files are
        removed before the new data appear.
        """
        commit_marker_path(self.output).touch()
        sidecar_path(self.output).unlink(missing_ok=True)
        if carried_path(self.output).resolve() != Path(settings.tokenizer_file).resolve():
            carried_path(self.output).unlink(missing_ok=True)

    def _write_carried(self, settings: TokenizeSettings) -> None:
        chat = settings.fields
        template = chat.template.source if isinstance(chat, Conversations) else None
        write_carried(self.output, self._tokenizer_text, template)


def _copy(
    shards: Iterable[DatasetShard], writer: IndexedDatasetAppender, rejected: Rejections, progress: Progress
) -> tuple[int, int]:
    """Copies shards in order; returns the number of bytes of their text, and their largest token id."""
    text_bytes, max_token_id, line_base = 0, 0, 0
    for shard in shards:
        header = shard.header
        line_base = 0 if header.first else line_base
        for where, line, reason, detail in header.rejected:
            rejected.add(RejectedLine(where, line_base + line, NoDocument(reason, detail)))
        line_base += header.lines
        ends = None if shard.ends is None else shard.ends.astype(np.int64)
        writer.extend(shard.sizes, shard.tokens(), documents=ends, continues=header.continues)
        text_bytes += header.text_bytes
        max_token_id = max(max_token_id, header.max_token_id)
        progress.update(writer.num_tokens * writer.dtype.itemsize)
    return text_bytes, max_token_id


def input_identity(settings: TokenizeSettings, source: DocumentReader) -> str:
    """Returns a hash of the settings and of the files' names and sizes; equal hashes mean equal datasets."""
    files = [(str(path), path.stat().st_size) for path in source.files]
    return hashlib.sha256(repr((settings.settings_digest, source.how, files)).encode()).hexdigest()[:16]


def commit_marker_path(output: str) -> Path:
    """Returns the file that marks a dataset at `output` as unfinished and made by megads, so that it may be
    replaced."""
    return parts_path(output) / "committing"


def remove_parts(output: str) -> None:
    """Removes the folder of parts. It is renamed first, so that other processes never see half of it."""
    gone = Path(f"{output}.{uuid.uuid4().hex[:8]}.parts-done")
    parts_path(output).rename(gone)
    shutil.rmtree(gone)


def parts_path(output: str) -> Path:
    """Returns the folder of the finished parts of an unfinished dataset."""
    return Path(f"{output}.parts")


@contextmanager
def parts_folder(output: str, together: bool = False) -> Iterator[Path]:
    """Makes and locks the folder of shards; removes it afterwards if it is empty.

    Args:
        output: prefix of the dataset.
        together: take a shared lock, which excludes only exclusive ones.

    Raises:
        ConfigError: another process makes the same dataset.
        DataError: the folder cannot be made.
    """
    folder = parts_path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(
            f"{folder}: writing failed: {reason_of(error)}; free space or permissions there, or choose another output"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output = {output}: another process is making it; wait for it or choose another output"
            ) from error
        yield folder
    finally:
        os.close(descriptor)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def document_token_id(tokenizer: Tokenizer, tokenizer_file: str, token: str | None, key: str) -> int | None:
    """Returns the id of a token that begins or ends documents, or None if there is none.

    Raises:
        ConfigError: the token is not in the tokenizer.
    """
    if token is None:
        return None
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        special = [added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special]
        has = f"its special tokens are {', '.join(special[:8])}" if special else "it has no special tokens"
        raise ConfigError(
            f"{key} = {token}: not a token of {tokenizer_file} ({has}); give one that it has, or {key}=null for none"
        )
    return found


def map_items(
    make: Callable[[], Callable[[int, Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """As `_map_in_processes`, but in this process if there is one worker."""
    if workers > 1:
        yield from _map_in_processes(make, items, workers)
        return
    function = make()
    with child_environment({"TOKENIZERS_PARALLELISM": "false"}):
        yield from (function(number, item) for number, item in enumerate(items))


def _map_in_processes(
    make: Callable[[], Callable[[int, Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Calls a function with the index and the value of every item, in new processes.

    Processes are spawned, not forked, because forking would copy running threads, such as PyTorch's, in an undefined
    state. They end with this process, however it ends.

    Args:
        make: called once in each process; returns the function. It must be picklable, and so must items and results.
        items: consumed only as fast as workers finish.
        workers: number of processes.

    Yields:
        Results in order of completion.

    Raises:
        UnhealthyNode: a process died.
        MegadsError: raised by the function.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(make,))
    running: set[Future[Result]] = set()
    try:
        for number, item in enumerate(items):
            running.add(executor.submit(_call, number, item))
            if len(running) >= _AHEAD * workers:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    except BrokenProcessPool as error:
        raise UnhealthyNode(
            f"one of {workers} tokenizing processes died, perhaps because memory ran out: finished parts are kept; run "
            "the same command again, with fewer workers if memory is short"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


class _Worker:
    """State of a worker process between items."""

    make: Callable[[], Callable[[int, Any], Any]]
    function: Callable[[int, Any], Any] | None = None


def _start(make: Callable[[], Callable[[int, Any], Any]]) -> None:
    # The terminal sends Ctrl-C to the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenize_on_one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.make = make


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _call(number: int, item: Any) -> Any:
    # Created here and not in the initializer, because only an exception of a call reaches the parent.
    if _Worker.function is None:
        _Worker.function = _Worker.make()
    return _Worker.function(number, item)
