"""Evaluation in one process, or on every rank of a layout, where only the first rank has requests.

Besides lm-eval's tasks: perplexity and bits per byte of texts, by document, and of a run's validation sets, with the
windows of the run.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    CheckpointHandle,
    ConfigError,
    DataError,
    EngineSpec,
    EventWriter,
    FoundTokenizer,
    IndexedDataset,
    LoaderShare,
    ModelConfig,
    OptimConfig,
    ParallelGrid,
    Position,
    RootConfig,
    TrainConfig,
    atomic_writer,
    batch_size_schedule,
    check_shape,
    choose_device,
    choose_dtype,
    load_frozen,
    load_unsharded,
    model_config_of,
    open_run_data,
    planned_steps,
    read_into,
    read_record,
    tokenizing,
)
from megads.config.phases import with_rope
from megads.data.sampling.loader import validation_batches
from megads.data.sampling.samples import WindowSubset
from megads.evaluate.validation import loss_values
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.harness_tasks import (
    LoadedTasks,
    lm_eval_results,
    load_tasks,
    metric_values,
    write_results,
)
from megads.tools.evaluate.needles import FoundNeedle, Haystack, measure_needles
from megads.tools.evaluate.scoring import (
    Batching,
    ModelScoringEngine,
    Scorer,
    TokenRow,
    rolling_rows,
)
from megads.tools.prepare.small_files import whole_texts
from megads.train.evaluation_hooks import VALIDATION_MICRO_BATCHES, packing

if TYPE_CHECKING:
    from megads.tools.evaluate.harness import HarnessModel

VALID = "valid"
_DOCUMENTS_AT_ONCE = 256

Progress = Callable[[str, int, int], None]
"""Called with a description, the number of finished items, and the total."""


def set_values(sums_2p: Tensor, text_bytes: int) -> dict[str, Any]:
    """Results on a set of texts, as in their file.

    Args:
        sums_2p: sum of the losses in nats, and number of predicted tokens, by position; see
            TrainEngine.losses_by_position.
        text_bytes: size of their text in UTF-8.

    Returns:
        Also with bits per byte, which are comparable between tokenizers; infinite without text.
    """
    values = loss_values(sums_2p)
    bits = values["loss"] * values["tokens"] / math.log(2)
    return {**values, "bits_per_byte": bits / text_bytes if text_bytes else math.inf, "bytes": text_bytes}


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
        ids = ids[1:] if ids and ids[0] == found.begin_of_document_id else ids
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
    progress: Progress,
) -> dict[str, Any]:
    """Evaluates a file or a dataset on the first rank; each document is preceded by the end-of-document token.

    If the documents of the training began with a token, that one precedes them; with a model imported from Hugging Face
    bos_token does, if the model has one.

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
    text_bytes, done, sums_2p = 0, 0, torch.zeros(2, scorer.batching.max_length, dtype=torch.float64)
    begins = found.adds_special_tokens or found.begin_of_document_id is not None
    first = found.first_token_id if begins else found.end_of_document_id
    max_length = scorer.batching.max_length
    source = itertools.islice(documents(given, found, text_field), limit)
    while block := list(itertools.islice(source, _DOCUMENTS_AT_ONCE)):
        rows = list[TokenRow]()
        for document in block:
            if first is not None:
                rows += rolling_rows(document.ids, first, max_length)
            elif document.ids:
                # The first token has no context and is not predicted.
                rows += rolling_rows(document.ids[1:], document.ids[0], max_length)
        for row, scored in zip(rows, scorer.score(rows), strict=True):
            sums_2p[0, row.places] -= torch.tensor(scored.by_token, dtype=torch.float64)
            sums_2p[1, row.places] += 1
        text_bytes += sum(document.text_bytes for document in block)
        done += len(block)
        progress(f"{given}, documents", done, done)
    if not sums_2p[1].any():
        raise DataError(f"data = {given}: holds no text")
    return set_values(sums_2p, text_bytes)


def measure_validation(
    run_dir: Path, scorer: Scorer, found: FoundTokenizer, limit: int | None, seq_len: int | None = None
) -> dict[str, dict[str, Any]]:
    """Evaluates the validation sets of a run, with the windows of its own validations; collective over the world.

    Args:
        run_dir: run directory; its data paths are resolved from the working directory.
        scorer: scorer whose engine computes the losses.
        found: tokenizer of the run.
        limit: maximum number of windows; None is as many as in the run's validations.
        seq_len: tokens of a window; None is the run's train.seq_len.

    Raises:
        ConfigError: the run has no config.
        DataError: the run has no validation set, or its data is missing.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} has no {CONFIG_FILE}, so its validation sets are not known: give tasks or data")
    config = load_frozen(run_dir / CONFIG_FILE, complete=False)
    # A run with training phases is evaluated with the validation sets of its last phase.
    end = batch_size_schedule(config).samples_after(planned_steps(config)) if config.train.phases else 1
    if seq_len is not None:
        config = replace(
            config, train=replace(config.train, seq_len=seq_len, phases=[], steps=1, samples=None, tokens=None)
        )
        end = 1
    _, sets = open_run_data(config, read_record(run_dir), end - 1)
    if not sets:
        raise DataError(f"{run_dir} was trained without a validation set: give tasks or data")
    # Only one of the ranks that share windows counts their bytes.
    grid = scorer.grid
    counts = grid.tp.is_first and grid.cp.is_first and grid.pp.is_first
    micro, plain = scorer.batching.micro_batch_size, replace(packing(config), mask_eod=False)
    sizes, results = TokenBytes(found), {}
    for name, source in sets.items():
        if source.seq_len % scorer.batching.unit:
            raise ConfigError(
                f"windows of {source.seq_len} tokens are not divisible by 2 * layout.cp = {scorer.batching.unit}: set "
                "another seq_len or layout.cp"
            )
        text_bytes, sums_2p = 0, torch.zeros(2, source.seq_len, dtype=torch.float64)
        most = config.evaluation.max_tokens if limit is None else limit * source.seq_len
        shown = source if most is None else WindowSubset(source, most)
        # Every pipeline stage gets tokens.
        share = LoaderShare(micro, grid.dp.rank, grid.dp.size, config.model.vocabulary, packing=plain)
        for batches in validation_batches(shown, share, VALIDATION_MICRO_BATCHES):
            sums_2p += scorer.engine.losses_by_position(batches, source.seq_len)
            for batch in batches if counts else ():
                assert batch.labels_bs is not None and batch.loss_mask_bs is not None
                for labels_s, mask_s in zip(batch.labels_bs, batch.loss_mask_bs, strict=True):
                    text_bytes += sizes.count(labels_s[mask_s > 0].tolist())
        results[name] = set_values(sums_2p, sum(grid.control.gather(text_bytes, int)))
    return results


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation.

    Attributes:
        harness_file: file with lm-eval's results; None without tasks.
        sets: results of the texts and validation sets, by name.
        sets_file: file with `sets`; None without sets.
        needles: results of the needles, see `measure_needles`; None without needles.
        needles_file: file with `needles`.
        metrics: metrics of tasks, sets and needles by name, for the events of the run.
        kept: tasks whose answers were cached by an earlier evaluation.
    """

    harness_file: str | None = None
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets_file: str | None = None
    needles: dict[str, Any] | None = None
    needles_file: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def evaluated_model(config: EvaluateConfig, model: ModelConfig) -> ModelConfig:
    """The model config of a checkpoint with the sequence length and RoPE of the evaluation.

    Raises:
        ConfigError: a value is invalid, or has no effect on the model.
    """
    seq_len, rope = config.seq_len, dict(config.rope_scaling)
    if seq_len is not None and model.position is Position.learned and seq_len > model.max_seq_len:
        raise ConfigError(
            f"seq_len = {seq_len} exceeds the {model.max_seq_len} learned positions of the checkpoint "
            "(model.max_seq_len), which knows none beyond: lower it"
        )
    changes = {"rope_theta": config.rope_theta} if config.rope_theta is not None else {}
    if rope.get("kind", model.rope_scaling.kind.value) != model.rope_scaling.kind.value:
        length = rope.setdefault("original_max_seq_len", model.max_seq_len)
        if isinstance(length, int) and length > 0:
            rope.setdefault("factor", max(1.0, (seq_len or model.max_seq_len) / length))
        rope = asdict(ModelConfig().rope_scaling) | rope
    changes |= {f"rope_scaling.{key}": value for key, value in rope.items()}
    try:
        return with_rope(model, changes)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.rope_", "rope_").replace("model: rope_", "rope_")) from error


def longest_row(config: EvaluateConfig, model: ModelConfig) -> int:
    """Maximum number of tokens of a row that the model reads."""
    return model.max_seq_len if config.seq_len is None else config.seq_len


def settings_of(config: EvaluateConfig, model: ModelConfig) -> dict[str, Any]:
    """The sequence length and RoPE that the evaluation sets, for its files; empty if those are the checkpoint's.

    Args:
        config: config of the user.
        model: model as it is evaluated.
    """
    given = {"seq_len": config.seq_len} if config.seq_len is not None else {}
    theta = {"rope_theta": model.rope_theta} if config.rope_theta is not None else {}
    scaling = asdict(model.rope_scaling) | {"kind": model.rope_scaling.kind.value}
    return {**given, **theta, **({"rope_scaling": scaling} if config.rope_scaling else {})}


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of `settings_of` in a few words, for example "at 256 tokens, yarn x 4"; empty without any."""
    words = [f"at {settings['seq_len']:,} tokens"] if "seq_len" in settings else []
    words += [f"RoPE base {settings['rope_theta']:,g}"] if "rope_theta" in settings else []
    if scaling := settings.get("rope_scaling"):
        words.append("no RoPE scaling" if scaling["kind"] == "none" else f"{scaling['kind']} x {scaling['factor']:g}")
    return ", ".join(words)


def load_unsharded_model(config: EvaluateConfig, handle: CheckpointHandle) -> Scorer:
    """Loads the unsharded model in this process."""
    device = choose_device(config.device)
    shape = evaluated_model(config, model_config_of(handle))
    model = load_unsharded(handle, device, choose_dtype(config.precision, device), shape)
    return Scorer(ModelScoringEngine(model), shape, Batching(config.batch_size, longest_row(config, shape)))


def load_layout(config: EvaluateConfig, handle: CheckpointHandle, grid: ParallelGrid, device: torch.device) -> Scorer:
    """Loads this rank's shard of the model; collective over the world."""
    # Imported here, because the engine imports DeepSpeed, which evaluation in one process does not need.
    from megads.engine.scoring_engine import LayoutScoringEngine

    shape = evaluated_model(config, model_config_of(handle))
    spec = EngineSpec(
        shape,
        config.layout.parallel,
        OptimConfig(),
        grid,
        precision=choose_dtype(config.precision, device),
        micro_batch_size=config.batch_size,
        seed=0,
        device=device,
        value=lambda _name, size: torch.empty(size),
    )
    engine = LayoutScoringEngine(spec)
    engine.load_weights(partial(read_into, handle))
    unit = 2 * grid.cp.size if grid.cp.size > 1 else 1
    return Scorer(engine, shape, Batching(config.batch_size, longest_row(config, shape), unit), grid)


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
    scorer: Scorer,
    tasks: LoadedTasks | None,
    output: Path,
    progress: Progress,
) -> Evaluated | None:
    """Runs all tasks and sets of the config on a checkpoint; collective over the world.

    Args:
        config: config of the user.
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        scorer: scorer of the checkpoint.
        tasks: tasks of the config, only on the first rank.
        output: folder of the results.
        progress: callback for progress.

    Returns:
        The results; None on ranks other than the first.
    """
    require_tokenizer_of(model_config_of(handle), found)
    sets: dict[str, dict[str, Any]] = {}
    given = config.data or ([] if config.tasks or config.needle.lengths else [VALID])
    if VALID in given:
        run_dir = handle.folder.parent.parent
        sets |= measure_validation(run_dir, scorer, found, config.limit, config.seq_len)
    with scorer.served() as asks:
        if not asks:
            return None
        for name in given:
            if name != VALID:
                sets[name] = measure_texts(scorer, found, name, config.text_field, config.limit, progress)
        result = Evaluated()
        if tasks is not None:
            dtype = str(choose_dtype(config.precision, scorer.engine.device)).removeprefix("torch.")
            model = open_harness(scorer, handle, found, dtype, output, progress)
            begin = time.perf_counter()
            results = lm_eval_results(model, tasks, config.bootstrap_iters, limit=config.limit, log_samples=True)
            sizes = config.layout.parallel.sizes
            layout = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
            about = {"pretrained": str(handle.folder), "dtype": dtype, **({"layout": layout} if layout else {})}
            path = write_results(results, output, about, config, time.perf_counter() - begin)
            metrics = metric_values(json.loads(path.read_text(encoding="utf-8")))
            result = Evaluated(str(path), metrics=metrics, kept=sorted(model.answers.kept))
        needles = _needles(config, scorer, found, output, progress) if config.needle.lengths else None
    settings = settings_of(config, scorer.model)
    # Results with other settings than the checkpoint's are other metrics.
    ending = f" {settings_text(settings)}" if settings else ""
    metrics = {name.replace("/", f"{ending}/", 1): value for name, value in result.metrics.items()}
    where: dict[str, Any] = {"checkpoint": str(handle.folder), "step": handle.state["step"], "settings": settings}
    for name, values in sets.items():
        metrics |= {f"{name}{ending}/{key}": values[key] for key in ("loss", "bits_per_byte")}
    if sets:
        result = replace(result, sets=sets, sets_file=_write(output, "perplexity", {**where, "sets": sets}))
    if needles is not None:
        for length in config.needle.lengths:
            shares = [cell["accuracy"] for cell in needles["cells"] if cell["length"] == length]
            metrics[f"needles of {length} tokens{ending}/accuracy"] = sum(shares) / len(shares)
        file = _write(output, "needles", {**where, "needles": needles})
        result = replace(result, needles=needles, needles_file=file)
    return replace(result, metrics=metrics)


def _write(output: Path, kind: str, content: Mapping[str, Any]) -> str:
    """Writes results to a new file in the output folder; returns its path."""
    path = output / f"{kind}_{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    output.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    return str(path)


def _needles(
    config: EvaluateConfig, scorer: Scorer, found: FoundTokenizer, output: Path, progress: Progress
) -> dict[str, Any]:
    """Evaluates the needles; with log_samples also writes every haystack."""
    lines: list[str] = []

    def record(haystack: Haystack, scored: FoundNeedle) -> None:
        text = found.tokenizer.decode(haystack.prompt, skip_special_tokens=False)
        shown = {key: value for key, value in asdict(haystack).items() if key not in ("prompt", "answers")}
        lines.append(json.dumps({**shown, **asdict(scored), "text": text}, ensure_ascii=False) + "\n")

    logged = record if config.log_samples else None
    results = measure_needles(scorer, found, config.needle, progress, logged, config.text_field)
    if lines:
        output.mkdir(parents=True, exist_ok=True)
        with atomic_writer(output / f"haystacks_{time.strftime('%Y-%m-%dT%H-%M-%S')}.jsonl") as file:
            file.write("".join(lines).encode())
    return results


def require_tokenizer_of(model: ModelConfig, found: FoundTokenizer) -> None:
    """Raises DataError if the tokenizer has more tokens than the model."""
    if found.vocab_size > model.vocabulary:
        raise DataError(
            f"{found.path} has {found.vocab_size} tokens and the model {model.vocabulary}: it is the tokenizer of "
            "another model; give tokenizer=<file> with the right one"
        )


def open_harness(
    scorer: Scorer,
    handle: CheckpointHandle,
    found: FoundTokenizer,
    dtype: str,
    output: Path,
    progress: Progress | None = None,
) -> HarnessModel:
    """lm-eval's model interface of a checkpoint, with its cached answers.

    Args:
        scorer: scorer of the checkpoint.
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        dtype: dtype of the computation.
        output: folder of the results.
        progress: callback for progress.
    """
    # lm-eval is installed, because the tasks are loaded.
    from megads.tools.evaluate.harness import AnswerCache, HarnessModel

    about = f"{handle.manifest.digest()} {dtype} {scorer.batching.max_length} {found.path.read_bytes().hex()}"
    recorded = model_config_of(handle)
    if (scorer.model.rope_theta, scorer.model.rope_scaling) != (recorded.rope_theta, recorded.rope_scaling):
        about += f" {scorer.model.rope_theta} {scorer.model.rope_scaling}"
    return HarnessModel(scorer, found, AnswerCache((output / "answers").absolute(), about), progress)


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
