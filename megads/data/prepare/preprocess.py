"""From raw text to an indexed dataset: in parallel, in constant memory, and on from where a killed start was."""

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from megads.data.config import RecordFields, TextSpecialTokens
from megads.data.indexed.dataset import bin_path, idx_path, token_dtype
from megads.data.indexed.sidecar import (
    Sidecar,
    carried_path,
    embedding_rows,
    file_checksum,
    load_tokenizer,
    sidecar_path,
    write_carried,
    write_sidecar,
)
from megads.data.indexed.verified_once import file_state, require_unchanged
from megads.data.indexed.writer import IndexedDatasetAppender
from megads.data.prepare.block_tokenizer import BlockTokenizer, Finished, TokenizeSettings, open_shard, shard_path
from megads.data.prepare.blocks import (
    STDIN,
    Block,
    block_bytes_of,
    blocks_of,
    first_texts,
    stdin_blocks,
    texts_of_places,
)
from megads.data.prepare.chat import Conversations, conversations
from megads.data.prepare.config import Engine, PreprocessConfig
from megads.data.prepare.engine import choose_engine
from megads.data.prepare.records import Fields, NotText
from megads.data.prepare.text import (
    DocumentReader,
    RejectedLine,
    Rejections,
    TextCutter,
    converted_text,
    custom_reader,
    no_documents,
    rejected_count,
)
from megads.errors import ConfigError, DataError, UnhealthyNode
from megads.runtime.environment import available_cores, exported, tokenize_on_one_thread
from megads.runtime.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")
# Items that wait for each worker: enough to keep it busy, few enough for memory.
_AHEAD = 2
# Of all files: tokenized before processes have started.
_SMALL_BYTES = 1 << 19
# In the folder of shards: the dataset under the output's name is ours, unfinished, and may be replaced.
_COMMITTING = "committing"


@dataclass(frozen=True)
class PreprocessReport:
    """What `preprocess` made.

    Attributes:
        output: prefix of the dataset.
        sidecar: the numbers, as written beside it.
        seconds: how long it took.
        kept_shards: parts that an earlier start had finished.
        engine: what tokenized.
        passed_over: files and folders that were not read, counted.
    """

    output: str
    sidecar: Sidecar
    seconds: float
    kept_shards: int = 0
    engine: str = ""
    passed_over: str = ""

    def __str__(self) -> str:
        made = self.sidecar
        lines = [
            f"{self.output}: {made.documents:,} documents, {made.tokens:,} tokens, {made.text_bytes / 1e6:,.1f} MB "
            f"of text ({made.text_bytes / made.tokens:.2f} bytes a token), largest token {made.max_token_id}",
            f"{self.seconds:.1f} s, {made.tokens / max(self.seconds, 1e-9):,.0f} tokens/s, engine {self.engine}",
        ]
        if self.kept_shards:
            lines[1] = f"{self.seconds:.1f} s; {self.kept_shards} parts kept from an earlier start"
        lines += [text for text in (self.passed_over, converted_text(made.converted_files)) if text]
        if made.rejected_lines:
            lines.append(f"{rejected_count(made.rejected_lines, made.rejected_files)} rejected, the first of them:")
            lines += [f"  {example}" for example in made.rejected_examples[:5]]
        return "\n".join(lines)


def preprocess(config: PreprocessConfig) -> PreprocessReport:
    """Tokenizes documents into `<output>.bin`, `<output>.idx` and the sidecar `<output>.json`.

    A copy of the tokenizer goes with them, as `<output>.tokenizer.json`: who has the dataset can read it. Finished
    parts are in `<output>.parts` meanwhile; the same call after a kill goes on from them. The bytes written do not
    depend on the number of workers or on kills.

    Args:
        config: input, tokenizer and output.

    Returns:
        What was made.

    Raises:
        ConfigError: the output exists, or the end-of-document token is not in the tokenizer.
        DataError: no documents, a damaged input or tokenizer file, or a full disk.
        UnhealthyNode: a worker process died.
    """
    config.check()
    start_s = time.monotonic()
    custom = custom_reader(config.reader)
    fields = document_fields(config, Path(config.tokenizer), config.end_of_document, config.text_special_tokens)
    source = None
    if config.input != [STDIN]:
        source = DocumentReader(
            config.input, fields, custom=custom, extensions=config.extensions, encoding=config.encoding
        )
    _refuse_to_overwrite(config, source.files if source else [])
    tokenizing = Tokenizing(
        config.tokenizer, config.output, config.end_of_document, "end_of_document", config.text_special_tokens
    )
    sidecar = tokenizing.run(source, fields, config.workers, config.engine)
    took_s, passed_over = time.monotonic() - start_s, source.passed_over if source else ""
    return PreprocessReport(config.output, sidecar, took_s, tokenizing.kept_shards, tokenizing.engine, passed_over)


def document_fields(
    config: RecordFields,
    tokenizer_file: Path | None,
    end_of_document: str | None,
    text_special_tokens: TextSpecialTokens,
    section: str = "",
) -> Fields:
    """Returns what of a record makes a document; arguments and errors as in `conversations`."""
    chat = conversations(config, tokenizer_file, end_of_document, text_special_tokens, section)
    if chat is not None:
        return chat
    if config.prompt_field is None or config.response_field is None:
        return (config.text_field,)
    return config.prompt_field, config.response_field


class Tokenizing:
    """One way from documents to a dataset and its sidecar.

    Args:
        tokenizer_file: in the format of Hugging Face `tokenizers`.
        output: prefix of the dataset; one that is there is replaced.
        end_of_document: token appended to every document, or None.
        end_key: the config key it comes from, for messages.
        text_special_tokens: with ignore, only real ends of documents are marked, whatever a text spells.

    Raises:
        ConfigError: the end-of-document token is not in the tokenizer.
        DataError: a damaged tokenizer file.
    """

    def __init__(
        self,
        tokenizer_file: str,
        output: str,
        end_of_document: str | None,
        end_key: str,
        text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore,
    ) -> None:
        tokenizer = load_tokenizer(tokenizer_file)
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = text_special_tokens is TextSpecialTokens.ignore
        self._text_special_tokens = text_special_tokens.value
        self._tokenizer_file = tokenizer_file
        self._tokenizer_text = Path(tokenizer_file).read_bytes()
        self._end_id = end_of_document_id(tokenizer, tokenizer_file, end_of_document, end_key)
        self._vocab_size = embedding_rows(tokenizer)
        self._dtype = token_dtype(self._vocab_size)
        self._output = output
        # Beside tokenizer.end_of_document stands tokenizer.engine.
        self._engine_key = f"{end_key.rpartition('end_of_document')[0]}engine"
        self.kept_shards = 0
        self.engine = ""

    def run(
        self, source: DocumentReader | None, fields: Fields, workers: int | None, engine: Engine = Engine.auto
    ) -> Sidecar:
        """Tokenizes documents.

        Args:
            source: the files; None is JSON lines from the standard input.
            fields: what of a record holds its text. Conversations are taken with the special tokens that their
                template writes, and nothing is appended to them.
            workers: processes; None takes as many as there are cores.
            engine: what tokenizes.

        Returns:
            The sidecar, as written.

        Raises:
            DataError: no documents, a damaged input, or a full disk. Finished parts are kept then, where there are any.
            UnhealthyNode: a worker process died.
        """
        if isinstance(fields, Conversations):
            self._text_special_tokens = TextSpecialTokens.parse.value
            self._tokenizer.encode_special_tokens = False
        with Progress("tokenizing", source.total_bytes if source else 0) as progress:
            return self._run(source, fields, workers, engine, progress)

    def _run(
        self, source: DocumentReader | None, fields: Fields, workers: int | None, engine: Engine, progress: Progress
    ) -> Sidecar:
        states = {path: file_state(path) for path in source.files} if source else {}
        last_cut = TextCutter(self._tokenizer).last_cut
        # Before the first block is read, whose reader keeps what it has decoded of a long row.
        sample = texts_of_places(source, fields) if source and engine is not Engine.hf else []
        blocks = blocks_of(source, block_bytes_of(source), last_cut) if source else stdin_blocks()
        first = list(islice(blocks, 2))
        if engine is not Engine.hf:
            sample += first_texts(first, fields)
        chosen = choose_engine(engine, self._tokenizer_file, self._tokenizer, sample, self._engine_key)
        self.engine = chosen.value
        settings = TokenizeSettings(
            os.path.realpath(self._tokenizer_file),
            hashlib.sha256(self._tokenizer_text).hexdigest(),
            fields,
            None if isinstance(fields, Conversations) else self._end_id,
            self._dtype.str,
            chosen.value,
            self._text_special_tokens,
        )
        with _parts_folder(self._output) as folder:
            make = functools.partial(BlockTokenizer, settings, folder)
            # One block is not worth a process, nor are small ones.
            small = workers is None and source is not None and source.total_bytes < _SMALL_BYTES
            workers = 1 if small or len(first) < 2 else workers or available_cores()
            num_shards = self._tokenize(make, chain(first, blocks), progress, workers)
            for path, state in states.items():
                require_unchanged(path, state)
            return self._join(folder, num_shards, source, settings)

    def _tokenize(
        self, make: Callable[[], BlockTokenizer], blocks: Iterator[Block], progress: Progress, workers: int
    ) -> int:
        """Makes all shards; returns their number."""
        finished: Iterator[Finished]
        if workers > 1:
            finished = _map_in_processes(make, blocks, workers)
        else:
            function = make()
            finished = (function(number, block) for number, block in enumerate(blocks))
        shards = tokens = done_bytes = restarted = 0
        threads = exported({"TOKENIZERS_PARALLELISM": "false"}) if workers == 1 else nullcontext()
        with threads:
            for one in finished:
                shards += 1
                self.kept_shards += one.kept
                restarted += one.restarted
                tokens += one.tokens
                done_bytes += one.input_bytes
                progress.update(done_bytes, f"{tokens:,} tokens")
        if restarted:
            made = "by hf" if self.engine == Engine.fast.value else "without its cache of words,"
            self.engine = f"{self.engine}, {restarted} of {shards} parts {made} after ids that differ"
        return shards

    def _join(
        self, folder: Path, num_shards: int, source: DocumentReader | None, settings: TokenizeSettings
    ) -> Sidecar:
        """Copies the shards into the dataset, which appears whole or not at all."""
        files = source.files if source else [Path(STDIN)]
        rejected = Rejections()
        text_bytes, max_token_id, line_base = 0, 0, 0
        with IndexedDatasetAppender(self._output, self._dtype) as writer:
            for number in range(num_shards):
                shard = open_shard(shard_path(folder, number))
                header = shard.header
                line_base = 0 if header.first else line_base
                for where, line, reason, detail in header.rejected:
                    rejected.add(RejectedLine(where, line_base + line, NotText(reason, detail)))
                line_base += header.lines
                ends = None if shard.ends is None else shard.ends.astype(np.int64)
                writer.extend(shard.sizes, shard.tokens(), documents=ends, continues=header.continues)
                text_bytes += header.text_bytes
                max_token_id = max(max_token_id, header.max_token_id)
            if not writer.num_documents:
                # Nothing worth keeping for another start.
                shutil.rmtree(folder)
                raise no_documents(files, rejected, settings.fields, source.section if source else "")
            (folder / _COMMITTING).touch()
            # A dataset without a sidecar is valid, one with another's is not: the old one goes before the new data
            # come.
            sidecar_path(self._output).unlink(missing_ok=True)
            if carried_path(self._output).resolve() != Path(self._tokenizer_file).resolve():
                carried_path(self._output).unlink(missing_ok=True)
        chat = settings.fields
        write_carried(
            self._output, self._tokenizer_text, chat.template.source if isinstance(chat, Conversations) else None
        )
        sidecar = Sidecar(
            tokenizer_sha256=settings.tokenizer_sha256,
            vocab_size=self._vocab_size,
            max_token_id=max_token_id,
            end_of_document_id=self._end_id,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=text_bytes,
            rejected_lines=rejected.count,
            rejected_reasons=dict(rejected.reasons),
            rejected_examples=rejected.examples,
            input_files=[str(path) for path in files],
            bin_checksum=writer.bin_checksum,
            idx_checksum=file_checksum(idx_path(self._output)),
            text_special_tokens=settings.text_special_tokens,
            rejected_files=rejected.files,
            converted_files=source.converted if source else {},
        )
        write_sidecar(self._output, sidecar)
        shutil.rmtree(folder)
        return sidecar


def parts_path(output: str) -> Path:
    """Returns the folder of the finished parts of a dataset that is being made."""
    return Path(f"{output}.parts")


@contextmanager
def _parts_folder(output: str) -> Iterator[Path]:
    """Makes the folder of shards and keeps other processes out of it; an empty one goes again.

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
            f"{folder}: writing failed: {error.strerror}; free space or permissions there, or choose another output"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output = {output}: another process is making it; wait for it or choose another output"
            ) from error
        yield folder
    finally:
        os.close(descriptor)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _refuse_to_overwrite(config: PreprocessConfig, files: list[Path]) -> None:
    unfinished = (parts_path(config.output) / _COMMITTING).exists()
    written = (bin_path(config.output), idx_path(config.output), sidecar_path(config.output))
    for path in (*written, carried_path(config.output)):
        if path.resolve() in [file.resolve() for file in files]:
            raise ConfigError(f"output = {config.output}: {path} is an input and would be lost; choose another output")
        if path.exists() and not config.overwrite and not unfinished:
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


def _map_in_processes(
    make: Callable[[], Callable[[int, Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Calls a function with the number and the value of every item, in fresh processes.

    Processes are spawned, not forked: threads of this process, such as torch's, are never copied in mid-work. They end
    with this process, however it ends.

    Args:
        make: called once in each process; returns the function. It must be picklable, and so must items and results.
        items: taken from the iterator only as fast as workers finish.
        workers: processes.

    Yields:
        Results in the order in which they are finished.

    Raises:
        UnhealthyNode: a process died.
        MegadsError: as the function raised it.
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
            f"one of {workers} tokenizing processes died, killed perhaps for want of memory: finished parts are kept, "
            "give the same command again, with fewer workers if memory is short"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


class _Worker:
    """What a worker process keeps between items."""

    make: Callable[[], Callable[[int, Any], Any]]
    function: Callable[[int, Any], Any] | None = None


def _start(make: Callable[[], Callable[[int, Any], Any]]) -> None:
    # The terminal sends Ctrl-C to all its processes; the parent alone answers it.
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
    # Made here, not at the start: what it raises reaches the parent only from a call.
    if _Worker.function is None:
        _Worker.function = _Worker.make()
    return _Worker.function(number, item)
