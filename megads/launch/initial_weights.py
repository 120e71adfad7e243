"""Resolves checkpoint.init_from in the launcher: the weights that a new run starts from.

A run that has a checkpoint of its own resumes from that, and no longer needs the other run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from megads.checkpoint.config import list_checkpoints
from megads.config.root import RootConfig
from megads.data.tokenizer_config import TextTokenizerConfig
from megads.errors import CheckpointError, ConfigError, DataError
from megads.runtime.run_dir import TOKENIZER_FILE

if TYPE_CHECKING:
    from megads.checkpoint.initial import WeightSource
    from megads.config.identity import Change
    from megads.data.indexed.run_tokenizer import TokenizerSource
    from megads.model.config import ModelConfig


def with_tokenizer_of_weights(config: RootConfig) -> RootConfig:
    """Returns the config with the tokenizer of the initial weights, if data.raw is used with no other tokenizer.

    Args:
        config: checked config, with run.dir and run.id as given by the user.

    Raises:
        CheckpointError: the weights do not exist.
        DataError: their tokenizer cannot be found.
    """
    wanted, init_from = config.tokenizer, config.checkpoint.init_from
    if init_from is None or config.data.raw is None or _has_tokenizer(wanted):
        return config
    from megads.checkpoint.initial import find_source
    from megads.data.indexed.run_tokenizer import kept_tokenizer

    given_dir = config.run.dir or (f"runs/{config.run.id}" if config.run.id else None)
    if given_dir is not None and list_checkpoints(Path(given_dir)) and (Path(given_dir) / TOKENIZER_FILE).is_file():
        path: Path | None = Path(given_dir) / TOKENIZER_FILE
    else:
        try:
            source = find_source(init_from)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. A run that started from it continues with run.id=<id>") from error
        record = source.tokenizer
        if record is None:
            return config
        path = kept_tokenizer(source.run_dir, record.sha256)
        if path is None:
            raise DataError(
                f"checkpoint.init_from = {init_from}: the tokenizer of these weights ({record}) is not in "
                f"{source.run_dir}: give it as tokenizer.path=<file>, or tokenizer.vocab_size=<tokens> to learn another"
            )
    return dataclasses.replace(config, tokenizer=dataclasses.replace(wanted, path=str(path)))


def _has_tokenizer(wanted: TextTokenizerConfig) -> bool:
    learnt = TextTokenizerConfig()
    return wanted.path is not None or (wanted.vocab_size, wanted.min_frequency) != (None, learnt.min_frequency)


def find_initial_weights(config: RootConfig, model: ModelConfig) -> tuple[WeightSource | None, list[str]]:
    """Finds the weights that a run starts from, and describes what it starts from.

    Args:
        config: config of the run, with run.dir set.
        model: model of the run, with the vocabulary size if it is known.

    Returns:
        The source of the weights, None for random initialization and for a resumed run; and lines to show to the user.

    Raises:
        CheckpointError: the weights do not exist.
        ConfigError: they are of another model, or of this run itself.
    """
    from megads.train.resume import find_resume_point, loads_given_path

    load, run_dir, init_from = config.checkpoint.load, Path(str(config.run.dir)), config.checkpoint.init_from
    if config.checkpoint.load_path is not None:
        if not loads_given_path(load, run_dir):
            return None, []
        return None, [
            f"checkpoint.load = {load}: continues with its weights, step, optimizer state, and place in the "
            "learning-rate schedule, the data and the random numbers; checkpoint.init_from takes the weights alone"
        ]
    if init_from is None:
        return None, []
    past = find_resume_point(load, run_dir)
    if past is not None:
        step = past.manifest.run.state["step"]
        return None, [
            f"resumes from its own checkpoint of step {step}: checkpoint.init_from = {init_from} applies only to "
            "the first start"
        ]
    from megads.checkpoint.initial import find_source

    source = find_source(init_from)
    if source.run_dir.resolve() == run_dir.resolve() or _is_own_upload(config):
        raise ConfigError(
            f"checkpoint.init_from = {init_from} is this run itself: give the new run another run.id, or leave "
            "checkpoint.init_from out to continue this one"
        )
    adapted = source.check_model(model)
    return source, [str(source), *(f"differs from the training of these weights: {text}" for text in adapted)]


def _is_own_upload(config: RootConfig) -> bool:
    checkpoint = config.checkpoint
    if checkpoint.upload is None or checkpoint.init_from is None:
        return False
    return f"{checkpoint.init_from.rstrip('/')}/".startswith(f"{checkpoint.upload_url(config.run.id)}/")


def changed_tokenizer(
    source: WeightSource, found: TokenizerSource | None, allowed: Collection[str]
) -> tuple[Change, ...]:
    """Compares the tokenizer of the data with the tokenizer of the initial weights.

    Args:
        source: source of the weights.
        found: tokenizer of the data; None if unknown.
        allowed: value of run.allow_changes.

    Returns:
        The allowed change; empty if every id stands for the same text.

    Raises:
        DataError: the tokenizers differ, and run.allow_changes does not allow it.
    """
    from megads.config.identity import TOKENIZER, Change
    from megads.data.indexed.run_tokenizer import source_of_run

    record = source.tokenizer
    if record is None or found is None or record.sha256 == found.record.sha256:
        return ()
    if found.gives_the_ids_of(source_of_run(source.run_dir, record)):
        return ()
    if TOKENIZER in allowed:
        return (Change(TOKENIZER, str(record), str(found.record)),)
    raise DataError(
        f"the data was made with another tokenizer ({found.record}) than the weights of checkpoint.init_from = "
        f"{source.path} were trained with ({record}): its ids mean other text to them. Make the data with "
        f"tokenizer.path={source.run_dir / TOKENIZER_FILE}, which data.raw takes by itself where tokenizer.path and "
        f"tokenizer.vocab_size are left out, or allow it with run.allow_changes=[{TOKENIZER}]"
    )
