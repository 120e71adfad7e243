"""Reads DeepSpeed's universal checkpoints: one folder per unsharded parameter with fp32 weights and moments.

    global_step100_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step100_universal/mp_rank_00_model_states.pt      other state that the trainer saved
    latest_universal                                         global_step100_universal

Parameters have the names of the trainer's model: Megatron-DeepSpeed, with or without a pipeline, or transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megads.errors import CheckpointError, ConfigError
from megads.tools.exchange.arguments import Arguments
from megads.tools.exchange.config import ImportConfig
from megads.tools.exchange.hugging_face import read_json_object
from megads.tools.exchange.layer_files import (
    FIRST_STATE_FILE,
    NAMES,
    UNIVERSAL_POINTERS,
    Stack,
    decoder_tensors,
    layers_of,
    merged,
    step_folder_of,
)
from megads.tools.exchange.megatron_deepspeed import (
    arguments_of,
    model_of,
    progress_of,
    stacks_of,
    unpadded_vocabulary,
    with_steps,
)
from megads.tools.exchange.pickles import attributes, load_inert, load_mapping
from megads.tools.exchange.source import MOMENTS, WEIGHT, Source, Stored, Tensors, TrainedSoFar, held
from megads.tools.hugging_face.architectures import architecture_of
from megads.tools.hugging_face.export import CONFIG_FILE

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


def lies_in(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    return (step_folder_of(folder, UNIVERSAL_POINTERS) / ZERO_FOLDER).is_dir()


def open_source(folder: Path, config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: the description of the model is missing, or megads does not support the model.
        CheckpointError: a file is missing or damaged.
    """
    found = step_folder_of(folder, UNIVERSAL_POINTERS)
    state_file = found / FIRST_STATE_FILE
    state = load_mapping(state_file) if state_file.is_file() else {}
    parameters = sorted(path.name for path in (found / ZERO_FOLDER).iterdir() if path.is_dir())
    if not parameters:
        raise CheckpointError(f"{found / ZERO_FOLDER}: holds no parameters")
    kinds = list(FILES) if config.optimizer and _has_moments(found, parameters) else [WEIGHT]
    by_kind = {kind: _stored(found, parameters, kind) for kind in kinds}
    progress = _progress(found, parameters, state) if len(kinds) > 1 else TrainedSoFar()
    if not any(_PIPELINE.fullmatch(name) or name.startswith(_LANGUAGE_MODEL) for name in by_kind[WEIGHT]):
        return _of_transformers(folder, found, by_kind, progress)
    arguments = arguments_of(state, state_file)
    model, unpadded = model_of(arguments), unpadded_vocabulary(state)
    tensors = {kind: _of_megatron(found, stored, stacks_of(model)) for kind, stored in by_kind.items()}
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


def _of_transformers(folder: Path, found: Path, by_kind: Mapping[str, Tensors], progress: TrainedSoFar) -> Source:
    places = [place for place in (folder, found) if (place / CONFIG_FILE).is_file()]
    if not places:
        raise ConfigError(
            f"{folder}: its parameters ({next(iter(by_kind[WEIGHT]))}, ...) have names of transformers, and the "
            f"model's {CONFIG_FILE} is missing: put it there"
        )
    content = read_json_object(places[0] / CONFIG_FILE, ConfigError)
    architecture = architecture_of(content)
    end = content.get("eos_token_id")
    return Source(
        title=f"DeepSpeed universal checkpoint of {architecture.class_name}, {found.name}",
        told_by=CONFIG_FILE,
        model=architecture.model_of(content),
        names=architecture.names,
        tensors=by_kind,
        end_of_document_id=end[0] if isinstance(end, list) and end else end,
        progress=progress,
    )


def _of_megatron(found: Path, stored: Tensors, stacks: Sequence[Stack]) -> dict[str, Stored]:
    """Returns the tensors by Megatron's names, for a model with or without a pipeline."""
    layers: dict[int, dict[str, list[Stored]]] = defaultdict(dict)
    tensors: dict[str, Stored] = {}
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


def _stored(found: Path, parameters: list[str], kind: str) -> dict[str, Stored]:
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


def _progress(found: Path, parameters: list[str], state: Mapping[str, Any]) -> TrainedSoFar:
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
    progress = progress_of(state, Arguments(attributes(state.get("args")), "args"))
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
