"""Initial weights from another run (checkpoint.init_from).

The other run is only read, and may still be training. Its layout and precision do not matter: a checkpoint holds the
fp32 master weights as rectangles of global tensors.

A mixture of experts may start from a dense model ("sparse upcycling", Komatsuzaki et al. 2022,
https://arxiv.org/abs/2212.05055): every expert is a copy of the dense MLP, and routers are initialized at random. All
experts compute the same, so that the outputs are those of the dense model if a token's weights add up to 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megads.checkpoint.config import described_folder
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.rank_file import Rectangle, whole
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
from megads.model.gpt import InitialValue
from megads.model.moe import EXPERT_BIAS, EXPERT_LOAD
from megads.optim.groups import AVERAGE
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import user_cache_dir
from megads.runtime.optional_tools import require_tool
from megads.runtime.url import is_url

_ADAPTED = ("rope_theta", "rope_scaling", "window", "layer_pattern")
"""Keys that no weight shape depends on, and that a run with a longer context changes."""

_BALANCE = ("moe.global_loss", "moe.sequence_loss", "moe.z_loss", "moe.bias_rate")
"""Keys of the balance of experts, which a run that continues from other weights may change."""

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."


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

    @property
    def has_experts(self) -> bool:
        """Whether the other run's model is a mixture of experts."""
        return bool(self.handle.manifest.run.model.get("moe", {}).get("num_experts"))

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
        upcycled = model.moe.enabled and not self.has_experts
        if upcycled:
            self._check_upcycling(model)
            differing = {key: both for key, both in differing.items() if not key.startswith("moe.")}
        adapted = {*_ADAPTED, *_BALANCE}
        if differing.get("moe.bias_rate", (0.0, 0.0))[1] == 0.0:
            adapted.remove("moe.bias_rate")  # the bias selects experts: without it, other experts compute
        refused = {key: values for key, values in differing.items() if key not in adapted}
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
        changed = [f"model.{key} {as_override(old)} -> {as_override(new)}" for key, (old, new) in differing.items()]
        return changed + ([_upcycling_note(model)] if upcycled else [])

    def _check_upcycling(self, model: ModelConfig) -> None:
        """Raises ConfigError if the experts of a model cannot start as copies of this dense model's MLPs."""
        theirs, name = self.handle.manifest.run.model, self.handle.folder.name
        dense = theirs.get("ffn_size") or 4 * theirs.get("hidden_size", ModelConfig().hidden_size)
        start = f"checkpoint.init_from = {self.path}: {name} is of a dense model, of whose MLPs experts start as copies"
        if model.expert_width != dense:
            raise ConfigError(
                f"{start}: model.moe.expert_ffn_size = {model.expert_width} must be their ffn_size = {dense}. Give "
                f"model.moe.expert_ffn_size={dense}, or leave checkpoint.init_from out"
            )
        if model.moe.shared_ffn_size:
            raise ConfigError(
                f"{start}; it has no weights for a shared expert, but model.moe.shared_ffn_size = "
                f"{model.moe.shared_ffn_size}. Give model.moe.shared_ffn_size=0, or leave checkpoint.init_from out"
            )


def _upcycling_note(model: ModelConfig) -> str:
    moe = model.moe
    text = f"model.moe.num_experts 0 -> {moe.num_experts}: experts start as copies of the MLPs, routers at random"
    if moe.normalize_weights and moe.routed_scale == 1.0:
        return text
    key = f"routed_scale = {moe.routed_scale}" if moe.normalize_weights else "normalize_weights = false"
    return f"{text}; with model.moe.{key} the outputs of experts are scaled from the first step on"


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


def read_weights(source: WeightSource, shards: Sequence[Shard], fresh: InitialValue) -> None:
    """Fills the shards of weights and of weight averages; optimizer state is not changed.

    Not collective.

    Args:
        source: source of the weights.
        shards: all shards of this rank.
        fresh: initial weights, for routers if the source is a dense model, and for the state of routers that the source
            does not have.

    Raises:
        CheckpointError: a weight is missing or has another shape; names it.
    """
    kinds, stored = ("weight/", f"{AVERAGE}/"), source.handle.manifest.tensors
    state = (f".{EXPERT_BIAS}", f".{EXPERT_LOAD}")
    plain = list[Shard]()
    for shard in shards:
        name = shard.key.partition("/")[2]
        if not shard.key.startswith(kinds):
            continue
        if f"weight/{name}" not in stored and not source.has_experts and _EXPERTS in name:
            _copy_experts(source.handle, shard, name)
        elif f"weight/{name}" not in stored and (name.endswith(state) or (not source.has_experts and _ROUTER in name)):
            within = Rectangle(tuple(shard.offset), tuple(shard.tensor.shape)).within
            shard.tensor.copy_(fresh(name, tuple(shard.global_shape))[within(whole(shard.global_shape))])
        else:
            plain.append(replace(shard, key=f"weight/{name}"))
    read_into(source.handle, plain)


def _copy_experts(handle: CheckpointHandle, shard: Shard, name: str) -> None:
    """Fills a part of a stacked weight of experts with copies of a dense model's MLP.

    Reads no more than one expert's part at a time, and once if all experts of the shard need the same.

    Args:
        handle: checkpoint of the dense model.
        shard: part of the stacked weight; the rows of `down` are input features, so that they are columns of the dense
            weight.
        name: name of the stacked weight.
    """
    key = f"weight/{name.replace(_EXPERTS, '.mlp.')}"
    transposed = name.endswith(".down.weight")
    dense = handle.manifest.tensors[key].shape if key in handle.manifest.tensors else shard.global_shape
    rows = dense[1] if transposed else dense[0]
    row, column = shard.offset
    end, known = row + len(shard.tensor), dict[tuple[int, int], Tensor]()
    while row < end:
        first = row % rows
        length = min(rows - first, end - row)
        part = shard.tensor.narrow(0, row - shard.offset[0], length)
        if (first, length) not in known:
            known.clear()
            found = torch.empty(part.shape[::-1]) if transposed else part
            at = (column, first) if transposed else (first, column)
            read_into(handle, [Shard(key, tuple(dense), at, found)])
            known[first, length] = found.T if transposed else found
        part.copy_(known[first, length])
        row += length
