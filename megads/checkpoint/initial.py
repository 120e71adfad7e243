"""Initial weights from another run (checkpoint.init_from).

The other run is only read, and may still be training. Its layout and precision do not matter: a checkpoint holds the
fp32 master weights as rectangles of global tensors.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megads.checkpoint.config import described_folder
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import (
    CheckpointHandle,
    as_override,
    differing_keys,
    open_checkpoint,
    read_into,
    readable_folders,
)
from megads.data.indexed.recorded import read_record
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError
from megads.model.config import ModelConfig, Position
from megads.optim.groups import AVERAGE
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import user_cache_dir
from megads.runtime.optional_tools import require_tool
from megads.runtime.url import is_url

_ADAPTED = ("rope_theta", "rope_scaling", "window", "layer_pattern")
"""Keys that no weight shape depends on, and that a run with a longer context changes."""


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint that provides the initial weights of a new run.

    Attributes:
        path: checkpoint.init_from.
        handle: the checkpoint.
    """

    path: str
    handle: CheckpointHandle

    @property
    def step(self) -> int:
        """Step of the other run."""
        return self.handle.state["step"]

    @property
    def run_dir(self) -> Path:
        """Folder of the other run."""
        return self.handle.folder.parent.parent

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """Tokenizer of the other run; None if unknown. Raises DataError if its data record is damaged."""
        run = self.handle.manifest.run
        if run.tokenizer is not None:
            return run.tokenizer
        data = read_record(self.run_dir, run.data_digest)
        return data.tokenizer if data is not None else None

    def __str__(self) -> str:
        text = f"checkpoint.init_from = {self.path}: starts from the weights of {self.handle.folder.name}"
        return "; ".join((f"{text}, all else is fresh", *(f"passed by {reason}" for reason in self.handle.skipped)))

    def check_model(self, model: ModelConfig) -> list[str]:
        """Checks that the weights fit the model of the new run.

        Args:
            model: config of the new model; a vocabulary size that is not known yet is not compared.

        Returns:
            One line per config key that changes without affecting whether the weights fit.

        Raises:
            ConfigError: shape or parts differ; names each key with both values.
        """
        theirs, ours = self.handle.manifest.run.model, asdict(model)
        kinds, ignored = {theirs.get("position", ModelConfig().position), ours["position"]}, set()
        kinds |= {kind["position"] for config in (theirs, ours) for kind in config.get("layer_pattern", ())} - {None}
        if model.vocab_size is None:
            ignored.add("vocab_size")
        if kinds != {Position.learned}:
            # Without learned positions, no weight shape depends on it.
            ignored.add("max_seq_len")
        if Position.rope not in kinds:
            ignored |= {"rope_theta", "rope_scaling"}
        differing = {key: both for key, both in differing_keys(theirs, ours).items() if key not in ignored}
        refused = {key: values for key, values in differing.items() if key not in _ADAPTED}
        if refused:
            found = "; ".join(
                f"model.{key}: {as_override(there)} there, {as_override(here)} here"
                for key, (there, here) in refused.items()
            )
            wanted = " ".join(shlex.quote(f"model.{key}={as_override(there)}") for key, (there, _) in refused.items())
            raise ConfigError(
                f"checkpoint.init_from = {self.path}: {self.handle.folder.name} is of another model ({found}). Weights "
                f"fit a model of the same shape and parts only: give {wanted}, or leave checkpoint.init_from out"
            )
        return [f"model.{key} {as_override(old)} -> {as_override(new)}" for key, (old, new) in differing.items()]


def find_source(path: str) -> WeightSource:
    """Finds the checkpoint that a new run will most likely start from; the ranks skip it if its tensors are damaged.

    For a URL, only the metadata of the checkpoint is downloaded.

    Args:
        path: checkpoint.init_from.

    Raises:
        CheckpointError: there is none.
    """
    skipped: list[str] = []
    try:
        if is_url(path):
            remote = require_tool("remote.download", f"checkpoint.init_from={path}")
            folders = [remote.fetch_description(path, described_folder(path, user_cache_dir()))]
        else:
            folders = readable_folders(Path(path))
        for folder in folders:
            try:
                return WeightSource(path, CheckpointHandle(folder, read_manifest(folder), tuple(skipped)))
            except CheckpointError as error:
                skipped.append(f"{folder.name}: {error}")
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.init_from = {error}") from error
    raise CheckpointError(f"checkpoint.init_from = {path}: no checkpoint in it is usable: {'; '.join(skipped)}")


def open_source(path: str, control: ControlPlane, folder: Path | None = None) -> WeightSource:
    """The checkpoint to start from, verified; collective, and every rank gets the same result.

    Args:
        path: checkpoint.init_from.
        control: control plane of all ranks.
        folder: folder of the downloaded checkpoint if path is a URL; None for a path.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    try:
        return WeightSource(path, open_checkpoint(folder or Path(path), control))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.init_from = {path}: {error}") from error


def read_weights(source: WeightSource, shards: Sequence[Shard]) -> None:
    """Fills the shards of weights and of weight averages; optimizer state is not changed.

    Not collective.

    Raises:
        CheckpointError: a weight is missing or has another shape; names it.
    """
    kinds = ("weight/", f"{AVERAGE}/")
    named = [(shard, shard.key.partition("/")[2]) for shard in shards if shard.key.startswith(kinds)]
    read_into(source.handle, [replace(shard, key=f"weight/{name}") for shard, name in named])
