"""Preprocesses raw text into an indexed dataset: in parallel, in constant memory, and resumable after a kill."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from megads.api import ConfigError, Sidecar, TextSpecialTokens, bin_path, carried_path, idx_path, sidecar_path
from megads.data.config import RecordFields
from megads.tools.prepare.blocks import STDIN
from megads.tools.prepare.chat import conversations
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.distributed import DistributedTask, TaskReport, refuse_other_tasks
from megads.tools.prepare.records import Fields
from megads.tools.prepare.rejections import rejected_count
from megads.tools.prepare.text import DocumentReader, converted_text, custom_reader
from megads.tools.prepare.text_files import size_text
from megads.tools.prepare.tokenizing import Tokenizing, commit_marker_path


@dataclass(frozen=True)
class PreprocessReport:
    """Result of `preprocess`.

    Attributes:
        output: prefix of the dataset.
        sidecar: the dataset's sidecar, as written.
        seconds: total duration.
        kept_shards: number of parts reused from an earlier start.
        engine: tokenizer implementation that was used.
        passed_over: description of skipped files and folders, with counts.
        join_seconds: part of the duration that was spent on joining the parts.
    """

    output: str
    sidecar: Sidecar
    seconds: float
    kept_shards: int = 0
    engine: str = ""
    passed_over: str = ""
    join_seconds: float = 0.0

    def __str__(self) -> str:
        made = self.sidecar
        lines = [
            f"{self.output}: {made.documents:,} documents, {made.tokens:,} tokens, {size_text(made.text_bytes)} "
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

    A copy of the tokenizer is written to `<output>.tokenizer.json`, so that the dataset can be decoded. Until the end,
    finished parts are in `<output>.parts`; after a kill, the same call continues from them. The bytes written do not
    depend on the number of workers or on kills.

    Args:
        config: input, tokenizer and output.

    Returns:
        A report.

    Raises:
        ConfigError: the output exists, or the end-of-document token is not in the tokenizer.
        DataError: no documents, a damaged input or tokenizer file, or a full disk.
        UnhealthyNode: a worker process died.
    """
    start_s = time.monotonic()
    config.check()
    _refuse_to_overwrite(config)
    source, fields, tokenizing = _prepared(config)
    refuse_other_tasks(config.output)
    sidecar = tokenizing.run(source, fields, config.workers, config.engine)
    return _report(config, sidecar, source, tokenizing, start_s)


def preprocess_together(config: PreprocessConfig) -> PreprocessReport | TaskReport:
    """Does a share of the work of `preprocess`, together with other processes that run it with the same config at the
    same time.

    The processes may run on any nodes that see the same folders. The last one joins the dataset, whose bytes are those
    of `preprocess`.

    Args:
        config: input, tokenizer and output.

    Returns:
        A report of the whole work in the process that joined the dataset; in the others, of their own.

    Raises:
        ConfigError, DataError, UnhealthyNode: as `preprocess` does; also ConfigError if other processes make the same
        dataset, from other text or with other settings.
    """
    start_s = time.monotonic()
    config.check()
    source, fields, tokenizing = _prepared(config)
    assert source is not None, "checked by the config"
    task = DistributedTask(tokenizing, source, fields, config)
    sidecar = task.finished_sidecar()
    if sidecar is None:
        _refuse_to_overwrite(config)
        sidecar = task.run()
    if sidecar is not None and task.report.joined:
        return _report(config, sidecar, source, tokenizing, start_s)
    return task.report


def _report(
    config: PreprocessConfig, sidecar: Sidecar, source: DocumentReader | None, tokenizing: Tokenizing, start_s: float
) -> PreprocessReport:
    return PreprocessReport(
        config.output,
        sidecar,
        time.monotonic() - start_s,
        tokenizing.kept_shards,
        tokenizing.engine,
        source.passed_over if source else "",
        tokenizing.join_seconds,
    )


def _prepared(config: PreprocessConfig) -> tuple[DocumentReader | None, Fields, Tokenizing]:
    """Returns the files (None for the standard input), the fields that make up a document, and the tokenizing
    settings."""
    custom = custom_reader(config.reader)
    fields = document_fields(config, Path(config.tokenizer), config.end_of_document, config.text_special_tokens)
    source = None
    if config.input != [STDIN]:
        source = DocumentReader(
            config.input,
            fields,
            custom=custom,
            extensions=config.extensions,
            encoding=config.encoding,
            max_rejected=config.max_rejected,
        )
    files = [file.resolve() for file in source.files] if source else []
    for path in _written(config.output):
        if path.resolve() in files:
            raise ConfigError(f"output = {config.output}: {path} is an input and would be lost; choose another output")
    tokenizing = Tokenizing(
        config.tokenizer,
        config.output,
        config.end_of_document,
        "end_of_document",
        config.text_special_tokens,
        config.max_rejected,
        config.begin_of_document,
    )
    return source, fields, tokenizing


def document_fields(
    config: RecordFields,
    tokenizer_file: Path | None,
    end_of_document: str | None,
    text_special_tokens: TextSpecialTokens,
    section: str = "",
) -> Fields:
    """Returns the fields of a record that make up a document; arguments and errors as in `conversations`."""
    chat = conversations(config, tokenizer_file, end_of_document, text_special_tokens, section)
    if chat is not None:
        return chat
    if config.prompt_field is None or config.response_field is None:
        return (config.text_field,)
    if config.input_field is not None:
        return config.prompt_field, config.input_field, config.response_field
    return config.prompt_field, config.response_field


def _written(output: str) -> tuple[Path, ...]:
    return bin_path(output), idx_path(output), sidecar_path(output), carried_path(output)


def _refuse_to_overwrite(config: PreprocessConfig) -> None:
    if config.overwrite or commit_marker_path(config.output).exists():
        return
    for path in _written(config.output):
        if path.exists():
            raise ConfigError(f"output = {config.output}: {path} exists; choose another output or give overwrite=true")
