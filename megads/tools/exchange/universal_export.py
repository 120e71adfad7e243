"""Exports a checkpoint to a DeepSpeed universal checkpoint, for resuming with DeepSpeed and transformers.

    <output>/latest_universal
    <output>/global_step100/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    <output>/global_step100/zero/optimizer_state.pt
    <output>/global_step100/mp_rank_00_model_states.pt
    <output>/global_step100/config.json, tokenizer.json

One stage of one kind of tensor is in memory at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.checkpoint.read import CheckpointHandle, model_config_of, open_checkpoint
from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.plan.model_size import parameter_count, parameter_shapes
from megads.tools.exchange.layer_files import FIRST_STATE_FILE, UNIVERSAL_POINTERS
from megads.tools.exchange.source import MOMENTS, WEIGHT
from megads.tools.exchange.universal import FILES, PARAM, ZERO_FOLDER
from megads.tools.generate import checkpoint_tokenizer, run_path
from megads.tools.hugging_face.architectures import Architecture, choose_architecture
from megads.tools.hugging_face.config import ExportConfig, ExportPrecision
from megads.tools.hugging_face.export import read_stage, write_settings
from megads.tools.hugging_face.weights import links_by_stage, missing_biases
from megads.tools.output_folder import new_folder, require_free, require_room, write_origin

_MADE_BY = "megads export"
_ROW_CUT = ("attention.dense.weight", "mlp.down.weight")
"""Name suffixes of row-parallel parameters, which tensor parallelism shards along the second dimension."""
_GROUPS = 64


@dataclass(frozen=True)
class ExportedUniversal:
    """Result of an export.

    Attributes:
        folder: output folder.
        class_name: class in transformers whose parameter names are used.
        step: step of the run.
        kinds: kinds of the written tensors.
    """

    folder: Path
    class_name: str
    step: int
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        state = "with the optimizer's state" if len(self.kinds) > 1 else "without an optimizer's state, as the run"
        return f"{self.folder}: DeepSpeed universal checkpoint of {self.class_name}, step {self.step:,}, {state}"


def export_universal(config: ExportConfig) -> ExportedUniversal:
    """Exports a checkpoint.

    Raises:
        ConfigError: no published architecture expresses the model, the folder exists and may not be replaced, or an
            option does not apply to universal checkpoints.
        CheckpointError: the checkpoint is not usable, or the folder cannot be written.
        DataError: the tokenizer is missing or not the one of the training.
    """
    config.check()
    output = Path(config.output)
    require_free(output, config.overwrite, _MADE_BY)
    if config.average:
        raise ConfigError(
            "average = true: a universal checkpoint is for resuming, which needs the weights; leave average out"
        )
    if config.precision is ExportPrecision.bf16:
        raise ConfigError("precision = bf16: a universal checkpoint holds the fp32 weights; leave precision out")
    handle = open_checkpoint(run_path(config.run))
    model = model_config_of(handle)
    if model.mup.base_width is not None:
        raise ConfigError(
            f"the model has model.mup.base_width = {model.mup.base_width}: other trainers do not have its multipliers, "
            "and its moments are not valid for weights that include them. Export it to Hugging Face's format"
        )
    architecture = choose_architecture(model, "auto")
    tokenizer = checkpoint_tokenizer(handle, config.tokenizer)
    stored = handle.manifest.tensors
    names = parameter_shapes(model)
    moments = MOMENTS if all(f"{kind}/{name}" in stored for kind in MOMENTS for name in names) else ()
    kinds = (WEIGHT, *moments)
    # Weights are written twice: DeepSpeed also reads them from the module's state.
    require_room(output, 4 * parameter_count(model) * (len(kinds) + 1))
    step = handle.state["step"]
    with new_folder(output) as partial:
        folder = partial / f"global_step{step}"
        (folder / ZERO_FOLDER).mkdir(parents=True)
        written = _write_parameters(folder / ZERO_FOLDER, handle, model, architecture, kinds)
        torch.save(_optimizer_state(), folder / ZERO_FOLDER / "optimizer_state.pt")
        torch.save(_model_state(folder, written, handle), folder / FIRST_STATE_FILE)
        write_settings(folder, architecture, model, tokenizer, torch.float32)
        (partial / UNIVERSAL_POINTERS[0]).write_text(folder.name, encoding="utf-8")
        write_origin(partial, _MADE_BY)
    return ExportedUniversal(output, architecture.class_name, step, kinds)


def _write_parameters(
    zero: Path, handle: CheckpointHandle, model: ModelConfig, architecture: Architecture, kinds: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Writes one folder per parameter; returns the shapes by name."""
    written: dict[str, tuple[int, ...]] = {}
    taken = torch.tensor(float(handle.manifest.run.optimizer_steps))
    for kind in kinds:
        for name, tensor, about in _tensors(handle, model, architecture, kind):
            folder = zero / name
            if kind == WEIGHT:
                folder.mkdir()
                written[name] = tuple(tensor.shape)
                if len(kinds) > 1:
                    torch.save(taken, folder / "step.pt")
            # torch.save writes the whole storage of a view.
            torch.save({**about, PARAM: tensor.clone()}, folder / FILES[kind])
    return written


def _tensors(
    handle: CheckpointHandle, model: ModelConfig, architecture: Architecture, kind: str
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yields each tensor's name, the tensor, and the keys that DeepSpeed needs to shard it for tensor parallelism."""
    shapes = parameter_shapes(model)
    for stage in links_by_stage(model, architecture.names):
        ours = read_stage(handle, stage, shapes, kind)
        for link in stage:
            about: dict[str, Any] = {"cat_dim": int(link.ours[0].endswith(_ROW_CUT))}
            if link.ours[0] in ("embedding.word.weight", "head.weight"):
                about["vocab_tensor"] = True
            for name, tensor in zip(link.theirs, link.to_theirs([ours.pop(name) for name in link.ours]), strict=True):
                yield name, tensor, about
    always_biased = not architecture.optional_bias and architecture.wants.get("bias", True)
    for name, shape in missing_biases(model, architecture.names).items() if always_biased else ():
        yield name, torch.zeros(shape), {"cat_dim": 0}


def _optimizer_state() -> dict[str, Any]:
    """Returns the optimizer state that does not belong to a parameter.

    DeepSpeed loads as many parameter groups as are listed here, with their settings. The groups of the loading trainer
    are unknown. More groups than any trainer has are listed, without settings, so that it keeps its own settings.
    """
    return {"ds_version": version("deepspeed"), "param_groups": [{"params": []} for _ in range(_GROUPS)]}


def _model_state(folder: Path, written: Mapping[str, tuple[int, ...]], handle: CheckpointHandle) -> dict[str, Any]:
    """Returns the state that a DeepSpeed engine reads first; weights are memory-mapped from the parameters' files."""
    module = OrderedDict(
        (name, torch.load(folder / ZERO_FOLDER / name / FILES[WEIGHT], weights_only=True, mmap=True)[PARAM])
        for name in written
    )
    state, run = handle.state, handle.manifest.run
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in written.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state["step"] - run.optimizer_steps,
        "global_steps": state["step"],
        "global_samples": state["samples"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": version("deepspeed"),
        "iteration": state["step"],
        "tokens": state["tokens"],
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
