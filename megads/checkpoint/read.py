"""Finds the checkpoint to start from and reads it in any layout, or unsharded in one process.

All checksums are verified before anything is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.checkpoint.config import EVERYTHING, History, checkpoints_folder, list_checkpoints, named_by_latest, step_of
from megads.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    read_sequence,
    software,
    software_differences,
)
from megads.checkpoint.rank_file import (
    Rectangle,
    StoredTensor,
    add_cover_sums,
    cover_sum,
    file_name,
    opened,
    verify_tensors,
)
from megads.checkpoint.store import agreed, on_first, recover
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.model.config import LayerKind, ModelConfig
from megads.model.gpt import GPT
from megads.model.moe_config import MoEConfig
from megads.model.rope_scaling import RopeScalingConfig
from megads.optim.groups import AVERAGE
from megads.runtime.distributed import ALONE, ControlPlane

_IRRELEVANT_MODEL_KEYS = ("hidden_dropout", "attention_dropout", "init_std", "attention")
"""Keys of the model config that may change during a run, since they do not affect the meaning of the weights."""

_TRAINING_MOE_KEYS = ("capacity_factor", "overflow")
"""The same of its part `moe`."""

_DERIVED_MODEL_KEYS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "ffn_size": lambda config: 4 * int(config["hidden_size"]),
    "num_kv_heads": lambda config: int(config["num_heads"]),
    "head_size": lambda config: int(config["hidden_size"]) // int(config["num_heads"]),
    **dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), lambda config: int(config["bias"])),
}
"""Keys that are derived from others if they are null."""


@dataclass(frozen=True)
class CheckpointHandle:
    """A checkpoint with verified checksums.

    Attributes:
        folder: folder of the checkpoint.
        manifest: its manifest.
        skipped: newer checkpoints that are not usable, each with the reason.
        headers: cache of the file headers that were read, by file and key.
    """

    folder: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    headers: dict[str, Mapping[str, list[StoredTensor]]] = field(default_factory=dict, repr=False, compare=False)

    def stored_in(self, name: str) -> Mapping[str, list[StoredTensor]]:
        """Tensors in a file by key; each header is read once.

        Raises:
            CheckpointError: the file does not match the manifest.
        """
        if name not in self.headers:
            by_key: dict[str, list[StoredTensor]] = defaultdict(list)
            for tensor in self.manifest.stored_in(self.folder, name):
                by_key[tensor.key].append(tensor)
            self.headers[name] = by_key
        return self.headers[name]

    def parts_of(self, key: str, rank: int = 0) -> Iterator[StoredTensor]:
        """The stored parts of a tensor; headers of files are read lazily.

        Args:
            key: key of the tensor.
            rank: the files of ranks closest to this rank come first.

        Raises:
            CheckpointError: a file does not match the manifest.
        """
        for holder in sorted(self.manifest.tensors[key].files, key=lambda other: abs(other - rank)):
            yield from self.stored_in(file_name(holder)).get(key, ())

    @property
    def is_shared(self) -> bool:
        """Whether every rank can read all of it."""
        return True

    @property
    def home(self) -> Path:
        """Folder of the run that wrote it."""
        return self.folder.parent.parent

    @property
    def name(self) -> str:
        """Name for messages and events."""
        return self.folder.name

    @property
    def state(self) -> dict[str, int]:
        """Counters for TrainState.load_state_dict."""
        return self.manifest.run.state

    @property
    def optimizer_steps(self) -> int:
        return self.manifest.run.optimizer_steps

    def software_differences(self) -> list[str]:
        """Differences from the software that wrote it; any difference voids the guarantee of bitwise equal results."""
        return software_differences(self.manifest.software, software())


def find_checkpoint(
    run_dir: Path, load: str, control: ControlPlane = ALONE, history: History = EVERYTHING
) -> CheckpointHandle | None:
    """The checkpoint to start from, verified; collective, and every rank gets the same answer.

    Args:
        run_dir: the run's folder.
        load: "none"; "auto" for the newest usable one of this run; or the path of a checkpoint's folder, or of a run
            whose last committed one is taken.
        control: control plane of all ranks.
        history: the checkpoints of this run that count.

    Returns:
        None for "none", and for "auto" in a run that has no checkpoint yet.

    Raises:
        CheckpointError: the given checkpoint is not usable, or this run has checkpoints and none of them is usable:
            starting fresh would silently discard the run.
    """
    if load == "none":
        return None
    if load != "auto":
        folder = on_first(control, lambda: given_folder(Path(load)), Path)
        try:
            return CheckpointHandle(folder, _verified(folder, control))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint.load = {load} is not usable: {error}") from error

    def folders() -> list[Path]:
        recover(run_dir)
        return _newest_first(run_dir, history)

    handle, skipped = _first_usable(on_first(control, folders, list[Path]), control)
    if handle is None and skipped:
        raise CheckpointError(
            f"no checkpoint in {checkpoints_folder(run_dir)} is usable; checkpoint.load=none starts afresh: "
            + "; ".join(skipped)
        )
    return handle


def open_checkpoint(path: Path, control: ControlPlane = ALONE) -> CheckpointHandle:
    """Opens a checkpoint, or the newest usable checkpoint of a run, for reading only; collective.

    Changes nothing in the folder, so a run that is still training can be read.

    Args:
        path: see `readable_folders`.
        control: control plane of all ranks, which get the same result.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    handle, skipped = _first_usable(on_first(control, lambda: readable_folders(path), list[Path]), control)
    if handle is None:
        raise CheckpointError(f"no checkpoint in {path} is usable: " + "; ".join(skipped))
    return handle


def readable_folders(path: Path) -> list[Path]:
    """Candidate checkpoints for a path, in the order in which a reader tries them; not verified.

    Args:
        path: a checkpoint's folder, which is then the only candidate, a run's folder, or the folder of a run's
            checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if (path / MANIFEST_FILE).is_file():
        return [path.absolute()]
    run_dir = path.parent if checkpoints_folder(path.parent) == path else path
    found = _newest_first(run_dir)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: neither a manifest.json nor checkpoints/step_*")
    return found


def read_into(handle: CheckpointHandle, shards: Sequence[Shard], rank: int = 0) -> int:
    """Fills every shard from the stored rectangles that overlap it, whatever layout wrote them; not collective.

    Files are memory-mapped, so only the bytes that a shard needs are read. Headers are read lazily: a rank that loads
    in the layout it saved in reads only its own.

    Args:
        handle: the checkpoint.
        shards: shards to fill in place.
        rank: rank that the shards belong to; files of ranks closest to it are tried first.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: a key is missing or has another shape, or a file has disappeared; names the tensor.
    """
    read_bytes = 0
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in shards:
            target = Rectangle(tuple(shard.offset), tuple(shard.tensor.shape))
            filled = 0
            for part, overlap in stored_parts(handle, shard, rank):
                if part.file not in files:
                    files[part.file] = stack.enter_context(opened(handle.folder / part.file))
                source = files[part.file].get_tensor(part.name)[overlap.within(part.rectangle)]
                shard.tensor[overlap.within(target)].copy_(source)
                filled += overlap.elements
                read_bytes += source.nbytes
            if filled != target.elements:
                raise CheckpointError(
                    f"{handle.folder}: {shard.key} at {list(target.offset)} of shape {list(target.shape)}: "
                    f"{filled} of {target.elements} elements are stored"
                )
    return read_bytes


def stored_parts(handle: CheckpointHandle, shard: Shard, rank: int) -> Iterator[tuple[StoredTensor, Rectangle]]:
    """Stored parts that overlap a shard, each with the overlap in the global tensor, until the shard is covered.

    Args:
        handle: the checkpoint.
        shard: the shard to cover.
        rank: files of ranks closest to this rank are tried first.

    Raises:
        CheckpointError: its key is missing or has another shape, or a file has disappeared.
    """
    record, target = handle.manifest.tensors.get(shard.key), Rectangle(tuple(shard.offset), tuple(shard.tensor.shape))
    if record is None:
        raise CheckpointError(f"{handle.folder} holds no {shard.key}: it is of another model or optimizer (optim.name)")
    if record.shape != tuple(shard.global_shape):
        raise CheckpointError(
            f"{handle.folder}: {shard.key} has shape {list(record.shape)} there and "
            f"{list(shard.global_shape)} here: it is of another model"
        )
    left = target.elements
    for part in handle.parts_of(shard.key, rank):
        overlap = part.rectangle.overlap(target)
        if overlap is not None:
            yield part, overlap
            # Parts are disjoint, so each element is counted exactly once.
            left -= overlap.elements
        if left <= 0:
            return


def with_averages_from_weights(handle: CheckpointHandle, shards: Sequence[Shard]) -> list[Shard]:
    """The shards, with weight averages that the checkpoint does not hold read from its weights instead.

    A run that turns the weight average on later thus initializes it with the weights that it continues from.
    """
    stored = handle.manifest.tensors
    return [
        replace(shard, key=f"weight/{shard.key.partition('/')[2]}")
        if shard.key.startswith(f"{AVERAGE}/") and shard.key not in stored
        else shard
        for shard in shards
    ]


def check_model(handle: CheckpointHandle, model_config: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a checkpoint is of another model.

    Args:
        handle: the checkpoint.
        model_config: the run's model config as a dict (dataclasses.asdict of ModelConfig).

    Raises:
        CheckpointError: the configs differ; lists the keys.
    """
    differing = [
        f"model.{key}: {as_override(there)} there, {as_override(here)} here"
        for key, (there, here) in differing_keys(handle.manifest.run.model, model_config).items()
    ]
    if differing:
        raise CheckpointError(
            f"{handle.folder} is of another model ({'; '.join(differing)}): "
            "use its model config, another run.id, or checkpoint.load=none"
        )


def as_override(value: Any) -> str:
    """A value of a config as it is given on a command line, without the unset settings of a kind of layers."""
    if isinstance(value, LayerKind | RopeScalingConfig):
        usual = asdict(type(value)())
        value = {key: item for key, item in asdict(value).items() if item != usual[key]}
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_override(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        kinds = (
            {key: part for key, part in item.items() if part is not None} if isinstance(item, Mapping) else item
            for item in value
        )
        return f"[{', '.join(map(as_override, kinds))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def differing_keys(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that affect the meaning of the weights and differ between two model configs, sorted, with both values.

    A key that is derived from others in both configs is omitted: those others are reported.
    """
    derived = {key for key in _DERIVED_MODEL_KEYS if theirs.get(key) is None and ours.get(key) is None}
    theirs, ours = _meaning_of_weights(theirs), _meaning_of_weights(ours)
    keys = sorted((theirs.keys() | ours.keys()) - derived)
    return {key: (theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)}


def _meaning_of_weights(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The model config's keys that affect the meaning of the weights, with defaults for keys an older run lacks."""
    config = {**asdict(ModelConfig()), **model_config}
    config = {key: value for key, value in config.items() if key not in _IRRELEVANT_MODEL_KEYS}
    config["layer_pattern"] = [{**kind, "attention": None} for kind in config["layer_pattern"]]
    for part in (config, *config["layer_pattern"]):
        if part.get("rope_scaling") is not None:
            part["rope_scaling"] = {**asdict(RopeScalingConfig()), **part["rope_scaling"]}
    for key, derive in _DERIVED_MODEL_KEYS.items():
        if config[key] is None:
            config[key] = derive(config)
    moe = {**asdict(MoEConfig()), **config.pop("moe")}
    if moe["num_experts"] and moe["expert_ffn_size"] is None:
        moe["expert_ffn_size"] = config["ffn_size"]
    config |= {f"moe.{key}": value for key, value in moe.items() if key not in _TRAINING_MOE_KEYS}
    if config.get("position") == "alibi":
        # ALiBi has no position embedding table: the same weights work for any length.
        config.pop("max_seq_len", None)
    return config


def given_folder(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the last one that a run has committed.

    That is not always the one that `latest` names: a kill may happen between the commit and the update of `latest`.
    If the checkpoint that `latest` names is missing or its manifest is damaged, it is returned nevertheless, since an
    older one was not asked for.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.load = {path}: there is no such folder")
    for folder in () if (path / MANIFEST_FILE).exists() else (path, checkpoints_folder(path)):
        children = folder.iterdir() if folder.is_dir() else ()
        found = {child: read_sequence(child) for child in children if step_of(child) is not None and child.is_dir()}
        named = _named_by_latest(folder)
        if named is not None and found.get(named) is None:
            return named.absolute()
        if found:
            return max(found, key=lambda child: (found[child] or 0, child.name)).absolute()
    return path.absolute()


def _named_by_latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; None if the file is missing or does not name one."""
    name = named_by_latest(folder)
    return folder / name if step_of(Path(name)) is not None and Path(name).name == name else None


def _first_usable(folders: Sequence[Path], control: ControlPlane) -> tuple[CheckpointHandle | None, list[str]]:
    """The first intact checkpoint, and why those before it are not intact; collective."""
    skipped: list[str] = []
    for folder in folders:
        try:
            return CheckpointHandle(folder, _verified(folder, control), tuple(skipped)), skipped
        except CheckpointError as error:
            skipped.append(f"{folder.name}: {error}")
    return None, skipped


def _newest_first(run_dir: Path, history: History = EVERYTHING) -> list[Path]:
    """This run's checkpoints by descending sequence; those without a readable sequence first, so that they are
    reported."""
    found = []
    for step, folder in list_checkpoints(run_dir).items():
        sequence = read_sequence(folder)
        if history.has(folder, sequence):
            found.append((float("inf") if sequence is None else sequence, step, folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def _verified(folder: Path, control: ControlPlane) -> Manifest:
    """Verifies a checkpoint and returns its manifest; collective: each rank verifies a share of the files.

    Raises:
        CheckpointError: on every rank, if a file is not intact; names file and tensor.
    """
    manifest = agreed(control, lambda: read_manifest(folder))
    digests = control.gather(manifest.digest(), str)
    different = [index for index, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"rank {different[0]} sees another {folder} than rank 0: run.dir must be shared by all ranks"
        )
    share = sorted(manifest.files)[control.rank :: control.world_size]
    sums = control.gather(agreed(control, lambda: f"{verify_files(folder, manifest, share):032x}"), str)
    if add_cover_sums(int(found, 16) for found in sums) != manifest.cover_sum():

        def explain() -> None:
            raise CheckpointError(manifest.explain_coverage(folder) or "its files are not those of one checkpoint")

        on_first(control, explain, NoneType)
    return manifest


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str]) -> int:
    """Verifies some of a checkpoint's files; returns the cover sum of their tensors.

    Raises:
        CheckpointError: a file is not intact, or does not hold the tensors in the manifest; names file and tensor.
    """
    held: dict[str, set[str]] = {name: set() for name in names}
    for key, tensor in manifest.tensors.items():
        for name in map(file_name, tensor.files):
            if name in held:
                held[name].add(key)
    sums = []
    for name in names:
        about = f"(it holds {min(held[name])})"
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror} {about}") from error
        if found != manifest.files[name].bytes:
            raise CheckpointError(f"{folder / name} has {found} bytes instead of {manifest.files[name].bytes} {about}")
        stored = manifest.stored_in(folder, name)
        if {tensor.key for tensor in stored} != held[name]:
            raise CheckpointError(f"{folder / name} holds other tensors than the manifest says")
        verify_tensors(folder / name, stored)
        sums += [cover_sum(tensor.key, [tensor.rectangle]) for tensor in stored]
    return add_cover_sums(sums)


def load_unsharded(
    handle: CheckpointHandle, device: torch.device, dtype: torch.dtype, config: ModelConfig | None = None
) -> GPT:
    """Builds the unsharded model of a checkpoint, with only one copy of its weights in memory.

    Args:
        handle: the checkpoint.
        device: device of the model.
        dtype: dtype of its weights, rounded from the fp32 master weights as in training.
        config: its config with other settings that no weight depends on; None for the recorded one.

    Returns:
        The model in evaluation mode, without gradients.

    Raises:
        CheckpointError: this version cannot build its model, or a weight is missing.
    """
    model = GPT.empty(config or model_config_of(handle), device, dtype)
    with torch.no_grad():
        shards = [
            Shard(f"weight/{name}", tuple(parameter.shape), (0,) * parameter.dim(), parameter)
            for name, parameter in model.parameters_by_name().items()
        ]
        read_into(handle, shards)
    return model.eval().requires_grad_(False)


def model_config_of(handle: CheckpointHandle) -> ModelConfig:
    """The model config that the checkpoint records."""
    try:
        if "${" in str(handle.manifest.run.model):
            raise ValueError("${...} is never resolved in a manifest")
        merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), handle.manifest.run.model)
        return cast(ModelConfig, OmegaConf.to_object(merged))
    except (ValueError, OmegaConfBaseException) as error:
        raise CheckpointError(
            f"{handle.folder} is of a model that this version of megads cannot build "
            f"({str(error).splitlines()[0]}): use the version that wrote it"
        ) from error
