"""What `megads train` does about data before any rank starts: finds or makes it, and takes its vocabulary."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megads.checkpoint.config import list_checkpoints
from megads.config import RootConfig, batch_size_schedule, open_run_data, planned_steps
from megads.data.blend_config import DatasetConfig
from megads.data.config import Engine
from megads.errors import ConfigError, DataError
from megads.monitor.console import Console
from megads.runtime.metrics import EventWriter

if TYPE_CHECKING:
    from megads.data.prepare import Preparation, Prepared


def locate_data(config: RootConfig) -> tuple[RootConfig, Preparation | None]:
    """Says where a run's data is, made or not, so that the run can be named after it.

    Args:
        config: checked.

    Returns:
        The config with data.train in place of data.raw, the prepared tokenizer's path, and model.vocab_size where the
        dataset knows it already; and what to prepare, None for a dataset that the user made.

    Raises:
        ConfigError: the tokenizer does not fit the config, or nobody knows the vocabulary.
        DataError: no such text or dataset.
    """
    from megads.data.prepare import plan_preparation

    if config.data.raw is None:
        return _with_dataset_vocabulary(config), None
    preparation = plan_preparation(
        config.data, config.tokenizer, config.model.vocab_size, _cache_dir(config), remember=not config.run.dry_run
    )
    rows = config.model.vocab_size
    if rows is not None and rows < preparation.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is below the {preparation.vocab_size} tokens of tokenizer.path = "
            f"{config.tokenizer.path}: set model.vocab_size=null, which takes the tokenizer's, or give another one"
        )
    data = dataclasses.replace(config.data, raw=None, train=[DatasetConfig(str(preparation.prefix))])
    # The ids do not depend on what tokenized, and neither does the run's name.
    tokenizer = dataclasses.replace(
        config.tokenizer, path=str(preparation.tokenizer_file), vocab_size=None, engine=Engine.auto
    )
    return dataclasses.replace(config, data=data, tokenizer=tokenizer), preparation


def require_data(config: RootConfig) -> None:
    """Raises DataError where the data is missing, damaged or too little.

    Every rank opens the data too, but the user should not wait for that to learn of a mistyped path.
    """
    # The launcher may run on a node that does not train: only ranks copy.
    open_run_data(dataclasses.replace(config, data=dataclasses.replace(config.data, stage_to=None)))


def prepare_data(config: RootConfig, preparation: Preparation | None, run_dir: Path, console: Console) -> RootConfig:
    """Makes what is not there yet and checks that it is enough for the run.

    Args:
        config: as `locate_data` returned it.
        preparation: the same.
        run_dir: the run's folder, whose events record what was done.
        console: shows it.

    Returns:
        The config with model.vocab_size known.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the text cannot be read, or is too little.
    """
    if preparation is None:
        return config
    start_s = time.monotonic()
    prepared, cached = _find_or_make(preparation, console)
    events = EventWriter(run_dir)
    events.write(
        "data",
        message=f"{'found' if cached else 'made'} {prepared}",
        cached=cached,
        path=str(prepared.prefix),
        input=preparation.data.raw_patterns,
        tokens=prepared.sidecar.tokens,
        vocab_size=prepared.sidecar.vocab_size,
        seconds=round(time.monotonic() - start_s, 3),
    )
    events.close()
    console.poll()
    config = _with_vocabulary(config, prepared.sidecar.vocab_size)
    if config.model.vocabulary > 2 * prepared.sidecar.vocab_size:
        console.say(
            f"model.vocab_size = {config.model.vocabulary:,} is far above the tokenizer's "
            f"{prepared.sidecar.vocab_size:,}: model.vocab_size=null takes the tokenizer's",
            "warning",
        )
    try:
        require_data(config)
    except DataError as error:
        raise DataError(f"data.raw = {', '.join(preparation.data.raw_patterns)}: {error}") from error
    return config


def guard_data(config: RootConfig, preparation: Preparation | None, run_dir: Path) -> None:
    """Refuses data that changed since the run began, and records what it is.

    A run without a checkpoint begins anew, with whatever the data is now.

    Args:
        config: with its data made.
        preparation: what made it, None for a dataset of the user's.
        run_dir: the run's folder.

    Raises:
        DataError: a dataset of the same name holds something else than when the run began; says which and what.
    """
    from megads.data.recorded import record_data, require_recorded, write_record

    now = record_data(config.data, preparation.data.raw_patterns if preparation else ())
    if config.checkpoint.load != "none" and list_checkpoints(run_dir):
        require_recorded(run_dir, now)
    write_record(run_dir, now)


def build_index_maps(config: RootConfig, console: Console) -> None:
    """Builds the index maps of the whole planned run, and says how many there are.

    Raises:
        DataError: the data is missing, damaged or too little.
    """
    start_s = time.monotonic()
    train, _ = open_run_data(dataclasses.replace(config, data=dataclasses.replace(config.data, stage_to=None)))
    maps = train.build_maps(batch_size_schedule(config).samples_after(planned_steps(config)))
    console.say(f"prepared: {maps} index maps in {time.monotonic() - start_s:.1f} s; the run was not started")
    if config.data.stage_to is not None and config.data.cache_dir is None:
        console.say(
            f"data.stage_to = {config.data.stage_to}: each node looks for maps beside its copy; give data.cache_dir "
            "for it to find these",
            "warning",
        )


def data_fault(config: RootConfig) -> DataError | None:
    """Returns what is wrong with a run's data now, for a run that died of it; None where nothing is."""
    try:
        require_data(config)
    except DataError as error:
        return error
    return None


def describe_data(config: RootConfig, preparation: Preparation | None) -> tuple[RootConfig, str]:
    """Says what data a run would read or make, and makes nothing.

    Args:
        config: as `locate_data` returned it.
        preparation: the same.

    Returns:
        The config with the vocabulary the model would have at most, and a line of text.
    """
    path = ", ".join(item.path for item in config.data.train)
    if preparation is None:
        return config, path
    try:
        prepared = preparation.find()
    except DataError as error:
        prepared, state = None, f"would be made anew ({error}) from"
    else:
        state = "would be made from"
    if prepared is not None:
        return _with_vocabulary(config, prepared.sidecar.vocab_size), f"{path}, made before: {prepared}"
    return _with_vocabulary(config, preparation.vocab_size), f"{path}, {state} {preparation}"


def _find_or_make(preparation: Preparation, console: Console) -> tuple[Prepared, bool]:
    try:
        found = preparation.find()
    except DataError:
        # `make` looks again, holding the lock.
        found = None
    if found is not None:
        return found, True
    console.say(f"data: making {preparation.folder} from {preparation}")
    return preparation.make(lambda line: console.say(f"data: {line}", "warning")), False


def _cache_dir(config: RootConfig) -> Path:
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir)
    return (Path(config.run.dir).parent if config.run.dir else Path("runs")) / "data-cache"


def _with_vocabulary(config: RootConfig, vocab_size: int) -> RootConfig:
    """Fills in model.vocab_size where the user left it to the tokenizer."""
    if config.model.vocab_size is not None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _with_dataset_vocabulary(config: RootConfig) -> RootConfig:
    """Takes the vocabulary from the dataset's sidecar, and checks that a tokenizer that is named made the dataset."""
    if config.model.vocab_size is not None and config.tokenizer.path is None:
        return config
    from megads.data.indexed import IndexedDataset
    from megads.data.sidecar import read_sidecar, sidecar_path

    path = config.data.train[0].path
    sidecar = read_sidecar(path)
    if sidecar is None:
        if config.model.vocab_size is None and not config.run.dry_run:
            IndexedDataset(path)
            raise ConfigError(
                f"model.vocab_size is null, which takes the tokenizer's, but {sidecar_path(path)} is not there to tell "
                "it: set model.vocab_size"
            )
        return config
    given = config.tokenizer.path
    if given is not None and _sha256(given) != sidecar.tokenizer_sha256:
        raise DataError(
            f"tokenizer.path = {given}: is not the tokenizer that made {path}, whose sha256 starts with "
            f"{sidecar.tokenizer_sha256[:12]}: give that one, or leave it out"
        )
    return _with_vocabulary(config, sidecar.vocab_size)


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"tokenizer.path = {path}: cannot be read: {error.strerror}") from error
