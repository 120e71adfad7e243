"""Reads and writes DeepSpeed's universal checkpoints: per parameter a folder with fp32 weights and moments.

    global_step100_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step100_universal/mp_rank_00_model_states.pt      other state that the trainer saved
    latest_universal                                         global_step100_universal

Parameters have the names of the trainer's model: Megatron-DeepSpeed, with or without a pipeline, or transformers.

An export can be resumed with DeepSpeed and transformers:

    <output>/latest_universal
    <output>/global_step100/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    <output>/global_step100/zero/optimizer_state.pt
    <output>/global_step100/mp_rank_00_model_states.pt
    <output>/global_step100/config.json, tokenizer.json

One layer of one kind of tensor is in memory at a time.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.api import (
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    ModelConfig,
    model_config_of,
    open_checkpoint,
    parameter_count,
    parameter_shapes,
)
from megads.tools.convert.architecture import Architecture
from megads.tools.convert.architectures import architecture_of, choose_architecture
from megads.tools.convert.deepspeed_files import (
    FIRST_STATE_FILE,
    NAMES,
    UNIVERSAL_POINTERS,
    StackedProjection,
    decoder_tensors,
    latest_step_folder,
    layers_of,
    merged,
)
from megads.tools.convert.export import CONFIG_FILE, read_parameters, write_settings
from megads.tools.convert.export_config import ExportConfig, ExportPrecision
from megads.tools.convert.hugging_face import read_json_object
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.megatron_deepspeed import (
    model_of,
    read_arguments,
    read_progress,
    stacked_projections,
    vocabulary_before_padding,
    with_steps,
)
from megads.tools.convert.pickles import attributes, load_inert, load_mapping
from megads.tools.convert.source import (
    MOMENTS,
    WEIGHT,
    Arguments,
    Source,
    SourceTensor,
    Tensors,
    TrainingProgress,
    held,
)
from megads.tools.convert.weights import mappings_by_layer, missing_biases
from megads.tools.generate import checkpoint_tokenizer, run_path
from megads.tools.output_folder import new_folder, require_free_space, require_replaceable, write_origin

ZERO_FOLDER, PARAM = "zero", "param"
FILES = {WEIGHT: "fp32.pt", MOMENTS[0]: "exp_avg.pt", MOMENTS[1]: "exp_avg_sq.pt"}
"""Files of a parameter's folder, by kind."""
_PIPELINE = re.compile(r"(?:tied_modules\.embed|(\d+))\.(.+)")
_LANGUAGE_MODEL = "language_model."
_OF_LANGUAGE_MODEL = (
    ("language_model.embedding.", ""),
    ("language_model.encoder.final_layernorm.", "final_layernorm."),
    ("language_model.encoder.", ""),
    ("language_model.output_layer.", "lm_head."),
)


def is_this_format(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    return (latest_step_folder(folder, UNIVERSAL_POINTERS) / ZERO_FOLDER).is_dir()


def open_source(folder: Path, config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: the description of the model is missing, or megads does not support the model.
        CheckpointError: a file is missing or damaged.
    """
    found = latest_step_folder(folder, UNIVERSAL_POINTERS)
    state_file = found / FIRST_STATE_FILE
    state = load_mapping(state_file) if state_file.is_file() else {}
    parameters = sorted(path.name for path in (found / ZERO_FOLDER).iterdir() if path.is_dir())
    if not parameters:
        raise CheckpointError(f"{found / ZERO_FOLDER}: holds no parameters")
    kinds = list(FILES) if config.optimizer and _has_moments(found, parameters) else [WEIGHT]
    by_kind = {kind: _stored(found, parameters, kind) for kind in kinds}
    progress = _progress(found, parameters, state) if len(kinds) > 1 else TrainingProgress()
    if not any(_PIPELINE.fullmatch(name) or name.startswith(_LANGUAGE_MODEL) for name in by_kind[WEIGHT]):
        return _of_transformers(folder, found, by_kind, progress)
    arguments = read_arguments(state, state_file)
    model, unpadded = model_of(arguments), vocabulary_before_padding(state)
    tensors = {kind: _of_megatron(found, stored, stacked_projections(model)) for kind, stored in by_kind.items()}
    word = tensors[WEIGHT].get("word_embeddings.weight")
    if word is not None and unpadded is not None and word.shape[:1] == (unpadded,):
        # The checkpoint's writer has removed the padding.
        model = replace(model, vocab_size=unpadded)
    return Source(
        title=f"DeepSpeed universal checkpoint of Megatron-DeepSpeed, {found.name}",
        told_by=arguments.origin,
        model=model,
        names=NAMES,
        tensors=tensors,
        unpadded=unpadded,
        progress=progress,
    )


def _of_transformers(folder: Path, found: Path, by_kind: Mapping[str, Tensors], progress: TrainingProgress) -> Source:
    places = [place for place in (folder, found) if (place / CONFIG_FILE).is_file()]
    if not places:
        raise ConfigError(
            f"{folder}: its parameters ({next(iter(by_kind[WEIGHT]))}, ...) have names of transformers, and the "
            f"model's {CONFIG_FILE} is missing: put it there"
        )
    content = read_json_object(places[0] / CONFIG_FILE, ConfigError)
    architecture = architecture_of(content)
    model = architecture.model_of(content)
    end = content.get("eos_token_id")
    return Source(
        title=f"DeepSpeed universal checkpoint of {architecture.class_name}, {found.name}",
        told_by=CONFIG_FILE,
        model=model,
        names=architecture.names_of(model),
        tensors=by_kind,
        end_of_document_id=end[0] if isinstance(end, list) and end else end,
        progress=progress,
    )


def _of_megatron(found: Path, stored: Tensors, stacks: Sequence[StackedProjection]) -> dict[str, SourceTensor]:
    """Returns the tensors by Megatron's names, for a model with or without a pipeline."""
    layers: dict[int, dict[str, list[SourceTensor]]] = defaultdict(dict)
    tensors: dict[str, SourceTensor] = {}
    for name, item in stored.items():
        match = _PIPELINE.fullmatch(name)
        if match:
            layers[int(match[1] or 0)][match[2]] = [item]
            continue
        for start, ours in _OF_LANGUAGE_MODEL:
            if name.startswith(start):
                tensors |= merged(ours + name.removeprefix(start), [item], stacks)
                break
        else:
            tensors[name] = item
    return tensors | (decoder_tensors(layers_of(found, layers), stacks) if layers else {})


def _has_moments(found: Path, parameters: list[str]) -> bool:
    return any((found / ZERO_FOLDER / name / FILES[kind]).is_file() for name in parameters for kind in MOMENTS)


def _stored(found: Path, parameters: list[str], kind: str) -> dict[str, SourceTensor]:
    """Returns the tensors of a kind by parameter name; skips parameters that do not have it."""
    tensors = {}
    for name in parameters:
        path = found / ZERO_FOLDER / name / FILES[kind]
        if not path.is_file():
            continue
        tensor = load_mapping(path).get(PARAM)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: holds no tensor {PARAM}")
        tensors[name.removeprefix("module.")] = held(tensor, str(path))
    return tensors


def _progress(found: Path, parameters: list[str], state: Mapping[str, Any]) -> TrainingProgress:
    """Returns the training progress.

    Raises:
        CheckpointError: the optimizer's step count is missing, or differs between parameters.
    """
    steps = {int(_number(found / ZERO_FOLDER / name / "step.pt")) for name in parameters} - {-1}
    groups_file = found / ZERO_FOLDER / "optimizer_state.pt"
    if not steps and groups_file.is_file():
        # Older optimizers stored the step in the parameter groups.
        groups = load_mapping(groups_file).get("param_groups")
        said = [attributes(group).get("step") for group in groups] if isinstance(groups, list) else []
        steps = {step for step in said if isinstance(step, int)}
    if len(steps) != 1:
        told = f"say different numbers of steps ({sorted(steps)[:3]})" if steps else "have no step.pt"
        raise CheckpointError(
            f"{found / ZERO_FOLDER}: the parameters {told}, which the moments need; optimizer=false imports "
            "only the weights"
        )
    (taken,) = steps
    progress = read_progress(state, Arguments(attributes(state.get("args")), "args"))
    return with_steps(progress, taken)


def _number(path: Path) -> float:
    """Returns the number that a file of torch.save contains, or -1 if there is no file."""
    if not path.is_file():
        return -1
    value = load_inert(path)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise CheckpointError(f"{path}: holds no number of steps")
    return value


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
    require_replaceable(output, config.overwrite, _MADE_BY)
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
    if model.moe.enabled:
        raise ConfigError(
            f"the model has {model.moe.num_experts} experts: transformers trains them as one stacked tensor, of which "
            "megads writes no universal checkpoint. Export it to Hugging Face's format (leave format=universal out)"
        )
    architecture = choose_architecture(model, "auto")
    tokenizer = checkpoint_tokenizer(handle, config.tokenizer)
    stored = handle.manifest.tensors
    names = parameter_shapes(model)
    moments = MOMENTS if all(f"{kind}/{name}" in stored for kind in MOMENTS for name in names) else ()
    kinds = (WEIGHT, *moments)
    # Weights are written twice: DeepSpeed also reads them from the module's state.
    require_free_space(output, 4 * parameter_count(model) * (len(kinds) + 1))
    step = handle.state["step"]
    with new_folder(output) as partial:
        folder = partial / f"global_step{step}"
        (folder / ZERO_FOLDER).mkdir(parents=True)
        written = _write_parameters(folder / ZERO_FOLDER, handle, model, architecture, kinds)
        torch.save(_optimizer_state(), folder / ZERO_FOLDER / "optimizer_state.pt")
        torch.save(_model_state(folder, written, handle), folder / FIRST_STATE_FILE)
        write_settings(folder, architecture, model, tokenizer, handle.folder.parent.parent, torch.float32)
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
    shapes, names = parameter_shapes(model), architecture.names_of(model)
    for layer in mappings_by_layer(model, names):
        for link in layer:
            about: dict[str, Any] = {"cat_dim": int(link.ours[0].endswith(_ROW_CUT))}
            if link.ours[0] in ("embedding.word.weight", "head.weight"):
                about["vocab_tensor"] = True
            tensors = link.to_hugging_face(read_parameters(handle, link, shapes, kind))
            for name, tensor in zip(link.theirs, tensors, strict=True):
                yield name, tensor, about
    for name, shape in missing_biases(model, architecture.with_all_biases(model), names).items():
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
