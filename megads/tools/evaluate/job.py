"""Evaluation in one process, or on every rank of a layout, where only the first rank has requests.

Besides lm-eval's tasks: perplexity and bits per byte of texts, by document, and of a run's validation sets, with the
windows of the run.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from megads.batch import MicroBatch
from megads.checkpoint.read import CheckpointHandle, load_unsharded, model_config_of, read_into
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, batch_size_schedule, check_shape, open_run_data, planned_steps
from megads.config.train import TrainConfig
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.recorded import read_record
from megads.data.indexed.sidecar import FoundTokenizer, tokenizing
from megads.data.sampling.loader import validation_batches
from megads.data.sampling.samples import WindowSubset
from megads.engine.interface import EngineSpec
from megads.errors import ConfigError, DataError
from megads.evaluate.generation import Sampling, choose_device, choose_dtype
from megads.evaluate.validation import perplexity
from megads.model.config import ModelConfig
from megads.optim.config import OptimConfig
from megads.parallel.grid import ParallelGrid
from megads.runtime.distributed import ALONE
from megads.runtime.files import atomic_writer
from megads.runtime.lease import current_holder, is_in_use
from megads.runtime.metrics import EventWriter
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.harness_tasks import LoadedTasks, load_tasks, metric_values, run_harness
from megads.tools.evaluate.scoring import (
    Batching,
    CachedContinuation,
    Continuation,
    ModelScoringEngine,
    RescoredContinuation,
    Scorer,
    TokenRow,
    rolling_rows,
)
from megads.tools.prepare.small_files import whole_texts
from megads.train.evaluation_hooks import VALIDATION_MICRO_BATCHES, packing

if TYPE_CHECKING:
    from megads.tools.evaluate.harness import AnswerCache

VALID = "valid"
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class SetResult:
    """Loss of a model on a set of texts.

    Attributes:
        name: name of the set.
        loss: mean loss in nats per token.
        tokens: number of predicted tokens.
        text_bytes: size of their text in UTF-8.
    """

    name: str
    loss: float
    tokens: int
    text_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Converts the result to JSON, as in the file of results."""
        return {
            "loss": self.loss,
            "perplexity": perplexity(self.loss),
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.text_bytes,
        }

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, which are comparable between tokenizers; infinite without text."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else math.inf


class TokenBytes:
    """Number of text bytes of tokens.

    Args:
        found: the tokenizer.
    """

    def __init__(self, found: FoundTokenizer) -> None:
        self._path = found.path
        self._tokenizer: Tokenizer = found.tokenizer

    @cached_property
    def _by_token(self) -> dict[int, int] | None:
        """Bytes of each token of a byte-level tokenizer, where one character is one byte; None for other tokenizers."""
        content = json.loads(self._tokenizer.to_str())
        if (content.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        added = {item["id"]: 0 if item.get("special") else len(item["content"].encode()) for item in
                 content.get("added_tokens", [])}  # fmt: skip
        return {number: len(text) for text, number in self._tokenizer.get_vocab().items()} | added

    def count(self, ids: Sequence[int]) -> int:
        """Text bytes of a sequence of tokens; special tokens have none."""
        table = self._by_token
        if table is not None:
            return sum(table.get(number, 0) for number in ids)
        with tokenizing(self._path):
            return len(self._tokenizer.decode(list(ids)).encode())


@dataclass(frozen=True)
class MeasuredText:
    """Tokens of a document, without the end-of-document token, and the size of its text in bytes."""

    ids: list[int]
    text_bytes: int


def documents(given: str, found: FoundTokenizer, text_field: str) -> Iterator[MeasuredText]:
    """Reads the documents of a file or a dataset.

    Args:
        given: a file, read as by `megads preprocess`, or a dataset prefix.
        found: tokenizer of the model.
        text_field: JSON field that contains the text.

    Raises:
        DataError: the file or dataset does not exist or cannot be read.
    """
    path = Path(given)
    if path.is_file():
        for text in whole_texts(path, text_field, "data", "text_field"):
            with tokenizing(found.path):
                ids = found.tokenizer.encode(text, add_special_tokens=False).ids
            yield MeasuredText(ids, len(text.encode("utf-8", "replace")))
        return
    if not Path(f"{given}.idx").is_file():
        raise DataError(f"data = {given}: is neither a file nor the prefix of a dataset ({given}.idx), nor {VALID}")
    dataset, sizes = IndexedDataset(path), TokenBytes(found)
    for number in range(dataset.num_documents):
        ids = [int(token) for token in dataset.document_tokens(number)]
        ids = ids[:-1] if ids and ids[-1] == found.end_of_document_id else ids
        if ids and max(ids) >= found.vocab_size:
            raise DataError(
                f"data = {given}: document {number} has token {max(ids)}, the tokenizer {found.vocab_size:,} tokens: "
                "the dataset was made with another one"
            )
        yield MeasuredText(ids, sizes.count(ids))


def measure_texts(
    scorer: Scorer,
    found: FoundTokenizer,
    given: str,
    text_field: str,
    limit: int | None,
    progress: Callable[[str, int, int], None],
) -> SetResult:
    """Evaluates a file or a dataset on the first rank; each document is preceded by the end-of-document token.

    Args:
        scorer: computes the log-likelihoods.
        found: tokenizer of the model.
        given: see `documents`.
        text_field: see `documents`.
        limit: maximum number of documents; None is all.
        progress: callback for progress.

    Raises:
        DataError: there is no text.
    """
    log_likelihood, tokens, text_bytes, done = 0.0, 0, 0, 0
    source = itertools.islice(documents(given, found, text_field), limit)
    while block := list(itertools.islice(source, _DOCUMENTS_AT_ONCE)):
        rows = [row for document in block for row in _rows(document.ids, found, scorer.batching.max_length)]
        log_likelihood += sum(scored.log_likelihood for scored in scorer.score(rows))
        tokens += sum(row.counted for row in rows)
        text_bytes += sum(document.text_bytes for document in block)
        done += len(block)
        progress(f"{given}, documents", done, done)
    if not tokens:
        raise DataError(f"data = {given}: holds no text")
    return SetResult(given, -log_likelihood / tokens, tokens, text_bytes)


def _rows(ids: list[int], found: FoundTokenizer, max_length: int) -> list[TokenRow]:
    """Rows of a document. Without an end-of-document token, its first token has no context and is not predicted."""
    end = found.end_of_document_id
    return rolling_rows(ids[1:], ids[0], max_length) if end is None and ids else rolling_rows(ids, end or 0, max_length)


def measure_validation(
    run_dir: Path, scorer: Scorer, grid: ParallelGrid | None, found: FoundTokenizer, limit: int | None
) -> list[SetResult]:
    """Evaluates the validation sets of a run, with the windows of its own validations; collective over the world.

    Args:
        run_dir: run directory; its data paths are resolved from the working directory.
        scorer: scorer whose engine computes the losses.
        grid: parallel grid; None for one process.
        found: tokenizer of the run.
        limit: maximum number of windows; None is as many as in the run's validations.

    Raises:
        ConfigError: the run has no config.
        DataError: the run has no validation set, or its data is missing.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} has no {CONFIG_FILE}, so its validation sets are not known: give tasks or data")
    config = load_frozen(run_dir / CONFIG_FILE, complete=False)
    # A run with training phases is evaluated with the validation sets of its last phase.
    end = batch_size_schedule(config).samples_after(planned_steps(config)) if config.train.phases else 1
    _, sets = open_run_data(config, read_record(run_dir), end - 1)
    if not sets:
        raise DataError(f"{run_dir} was trained without a validation set: give tasks or data")
    control = ALONE if grid is None else grid.control
    # Only one of the ranks that share windows counts their bytes.
    counts = grid is None or (grid.tp.is_first and grid.cp.is_first and grid.pp.is_first)
    sizes, results = TokenBytes(found), []
    for name, source in sets.items():
        loss_sum, tokens, text_bytes = 0.0, 0, 0
        most = config.evaluation.max_tokens if limit is None else limit * source.seq_len
        shown = source if most is None else WindowSubset(source, most)
        for batches in _batches(config, shown, scorer, grid):
            result = scorer.engine.evaluate(batches)
            loss_sum, tokens = loss_sum + result.loss_sum, tokens + result.tokens
            text_bytes += sum(_label_bytes(sizes, batch) for batch in batches) if counts else 0
        total_bytes = sum(control.gather(text_bytes, int))
        results.append(SetResult(name, loss_sum / max(tokens, 1), tokens, total_bytes))
    return results


def _batches(config: RootConfig, source: Any, scorer: Scorer, grid: ParallelGrid | None) -> Iterator[list[MicroBatch]]:
    rank, size = (0, 1) if grid is None else (grid.dp.rank, grid.dp.size)
    micro, plain = scorer.batching.micro_batch_size, replace(packing(config), mask_eod=False)
    # Every pipeline stage gets tokens.
    return validation_batches(source, micro, rank, size, config.model.vocabulary, True, VALIDATION_MICRO_BATCHES, plain)


def _label_bytes(sizes: TokenBytes, batch: MicroBatch) -> int:
    assert batch.labels_bs is not None and batch.loss_mask_bs is not None
    rows = zip(batch.labels_bs, batch.loss_mask_bs, strict=True)
    return sum(sizes.count(labels_s[mask_s > 0].tolist()) for labels_s, mask_s in rows)


Progress = Callable[[str, int, int], None]
MakeContinuation = Callable[[Sampling, Sequence[int]], Continuation]


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation.

    Attributes:
        harness_file: file with lm-eval's results; None without tasks.
        sets: results of the texts and validation sets, by name.
        sets_file: file with `sets`; None without sets.
        metrics: metrics of tasks and sets by name, for the events of the run.
        kept: tasks whose answers were cached by an earlier evaluation.
    """

    harness_file: str | None = None
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets_file: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedScorer:
    """A checkpoint that is ready to score.

    Attributes:
        scorer: computes log-likelihoods.
        continuation: creates generators that continue sequences.
        dtype: dtype of weights and activations.
        grid: parallel grid; None for one process.
    """

    scorer: Scorer
    continuation: MakeContinuation
    dtype: torch.dtype
    grid: ParallelGrid | None = None


def load_unsharded_model(config: EvaluateConfig, handle: CheckpointHandle) -> LoadedScorer:
    """Loads the unsharded model in this process."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.precision, device)
    model = load_unsharded(handle, device, dtype)
    shape = model_config_of(handle)
    scorer = Scorer(ModelScoringEngine(model), shape, Batching(config.batch_size, shape.max_seq_len))
    return LoadedScorer(scorer, partial(CachedContinuation, model), dtype)


def load_layout(
    config: EvaluateConfig, handle: CheckpointHandle, grid: ParallelGrid, device: torch.device
) -> LoadedScorer:
    """Loads this rank's shard of the model; collective over the world."""
    # Imported here, because the engine imports DeepSpeed, which evaluation in one process does not need.
    from megads.engine.scoring_engine import LayoutScoringEngine

    shape, dtype = model_config_of(handle), choose_dtype(config.precision, device)
    spec = EngineSpec(
        shape,
        config.layout.parallel,
        OptimConfig(),
        grid,
        precision=dtype,
        micro_batch_size=config.batch_size,
        seed=0,
        device=device,
        value=lambda _name, size: torch.empty(size),
    )
    engine = LayoutScoringEngine(spec)
    engine.load_weights(partial(read_into, handle))
    unit = 2 * grid.cp.size if grid.cp.size > 1 else 1
    scorer = Scorer(engine, shape, Batching(config.batch_size, shape.max_seq_len, unit), grid)
    return LoadedScorer(scorer, lambda sampling, _numbers: RescoredContinuation(scorer, sampling), dtype, grid)


def check_layout(config: EvaluateConfig, model: ModelConfig) -> None:
    """Raises ConfigError if the layout does not fit the model."""
    parallel = config.layout.parallel
    unit = 2 * parallel.cp
    train = TrainConfig(steps=1, micro_batch_size=1, global_batch_size=parallel.dp, seq_len=unit)
    try:
        check_shape(RootConfig(model=model, parallel=parallel, train=train))
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.", "layout.")) from error


def load_configured_tasks(config: EvaluateConfig) -> LoadedTasks | None:
    """Loads the tasks of the config; None if there are none."""
    folder = None if config.tasks_folder is None else Path(config.tasks_folder)
    return load_tasks(config.tasks, folder, config.num_fewshot) if config.tasks else None


def evaluate_checkpoint(
    config: EvaluateConfig,
    handle: CheckpointHandle,
    found: FoundTokenizer,
    loaded: LoadedScorer,
    tasks: LoadedTasks | None,
    output: Path,
    progress: Progress,
) -> Evaluated | None:
    """Runs all tasks and sets of the config on a checkpoint; collective over the world.

    Args:
        config: config of the user.
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        loaded: scorer of the checkpoint.
        tasks: tasks of the config, only on the first rank.
        output: folder of the results.
        progress: callback for progress.

    Returns:
        The results; None on ranks other than the first.
    """
    require_tokenizer_of(model_config_of(handle), found)
    sets: list[SetResult] = []
    given = config.data or ([] if config.tasks else [VALID])
    if VALID in given:
        sets += measure_validation(handle.folder.parent.parent, loaded.scorer, loaded.grid, found, config.limit)
    with loaded.scorer.served() as asks:
        if not asks:
            return None
        for name in given:
            if name != VALID:
                sets.append(measure_texts(loaded.scorer, found, name, config.text_field, config.limit, progress))
        result = _harness(config, handle, found, loaded, tasks, output, progress) if tasks is not None else Evaluated()
    by_name = {one.name: one.as_json() for one in sets}
    metrics = {f"{name}/{key}": values[key] for name, values in by_name.items() for key in ("loss", "bits_per_byte")}
    sets_file = _write_sets(handle, by_name, output) if by_name else None
    return Evaluated(result.harness_file, by_name, sets_file, result.metrics | metrics, result.kept)


def require_tokenizer_of(model: ModelConfig, found: FoundTokenizer) -> None:
    """Raises DataError if the tokenizer has more tokens than the model."""
    if found.vocab_size > model.vocabulary:
        raise DataError(
            f"{found.path} has {found.vocab_size} tokens and the model {model.vocabulary}: it is the tokenizer of "
            "another model; give tokenizer=<file> with the right one"
        )


def _harness(
    config: EvaluateConfig,
    handle: CheckpointHandle,
    found: FoundTokenizer,
    loaded: LoadedScorer,
    tasks: LoadedTasks,
    output: Path,
    progress: Progress,
) -> Evaluated:
    # lm-eval is installed, because the tasks are loaded.
    from megads.tools.evaluate.harness import HarnessModel

    dtype = str(loaded.dtype).removeprefix("torch.")
    answers = answer_cache(handle, found, dtype, loaded.scorer.batching.max_length, output)
    model = HarnessModel(loaded.scorer, found, loaded.continuation, answers, progress)
    sizes = config.layout.parallel.sizes
    layout = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    named = {"pretrained": str(handle.folder), "dtype": dtype, **({"layout": layout} if layout else {})}
    path = run_harness(
        model, tasks, output, named, config.limit, config.batch_size, config.log_samples, config.bootstrap_iters
    )
    metrics = metric_values(json.loads(path.read_text(encoding="utf-8")))
    return Evaluated(str(path), metrics=metrics, kept=sorted(answers.kept))


def answer_cache(
    handle: CheckpointHandle, found: FoundTokenizer, dtype: str, max_length: int, output: Path
) -> AnswerCache:
    """Cache of a checkpoint's answers.

    Args:
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        dtype: dtype of the computation.
        max_length: maximum number of input tokens.
        output: folder of the results.
    """
    from megads.tools.evaluate.harness import AnswerCache

    about = f"{handle.manifest.digest()} {dtype} {max_length} {found.path.read_bytes().hex()}"
    return AnswerCache((output / "answers").absolute(), about)


def _write_sets(handle: CheckpointHandle, sets: dict[str, dict[str, Any]], output: Path) -> str:
    path = output / f"perplexity_{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    output.mkdir(parents=True, exist_ok=True)
    content = {"checkpoint": str(handle.folder), "step": handle.state["step"], "sets": sets}
    with atomic_writer(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    return str(path)


def refuse_concurrent(folder: Path) -> None:
    """Raises ConfigError if another evaluation holds a folder of ranks or of a coordinator."""
    holder = current_holder(folder)
    if holder is not None and is_in_use(folder):
        raise ConfigError(
            f"{folder.parent}: {holder} evaluates there already: wait for it, stop it ({holder.remedy}), or give "
            "another folder of results with output=<folder>"
        )


def record_results(checkpoint: Path, step: int, files: Sequence[str], metrics: dict[str, float]) -> None:
    """Writes an event to the run that contains a checkpoint, if there is one.

    Args:
        checkpoint: checkpoint folder.
        step: step at which it was saved.
        files: files with the results.
        metrics: metrics of tasks and sets by name.
    """
    run_dir = checkpoint.parent.parent
    if not (run_dir / EVENTS_FILE).is_file():
        return
    events = EventWriter(run_dir)
    events.write("evaluation", step=step, files=list(files), results=metrics)
    events.close()


def to_plain(result: Evaluated) -> str:
    """Converts results to JSON for the process that started the ranks."""
    return json.dumps(asdict(result))
