"""Reads a folder in Hugging Face's format into a checkpoint of megads: weights alone, of step 0.

The weights are read, converted and written stage by stage. Nothing in the folder is run: config.json is data, tensors
come from safetensors or by torch's weights-only unpickler.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_parts
from megads.data.config import TextSpecialTokens
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import embedding_rows, load_tokenizer, template_beside, template_path, tokenizer_sha256
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError, DataError
from megads.model.config import ModelConfig
from megads.plan.model_size import parameter_count, parameter_shapes
from megads.runtime.files import parse_json, read_regular
from megads.runtime.run_dir import TOKENIZER_FILE
from megads.tools.hugging_face.architectures import Architecture, architecture_of
from megads.tools.hugging_face.config import ImportConfig
from megads.tools.hugging_face.export import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    new_folder,
    require_free,
    write_origin,
)
from megads.tools.hugging_face.weights import links, links_by_stage, tensor_shapes

_MADE_BY = "megads import"
_SINGLE_FILES = (SINGLE_FILE, "pytorch_model.bin")
_INDEX_FILES = (INDEX_FILE, "pytorch_model.bin.index.json")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names of what old files hold besides weights: masks and angles."""
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMED = 5
_LONGEST_SAMPLE = 2048
"""Of the preset; attention to more costs memory that a first try may not have."""


@dataclass(frozen=True)
class Imported:
    """What was read.

    Attributes:
        folder: a run without training.
        model: its shape.
        class_name: of transformers.
        preset: file with the model's config.
    """

    folder: Path
    model: ModelConfig
    class_name: str
    preset: Path

    def __str__(self) -> str:
        return f"{self.folder}: {self.class_name}, {parameter_count(self.model):,} parameters"


class TensorFiles:
    """The tensors of a folder, by name; a context manager that holds their files open.

    Args:
        folder: with safetensors or pytorch_model.bin, one file or several with an index.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self.files = self._find()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        try:
            held = self._opened(file)
            tensor: Tensor = held[name] if isinstance(held, dict) else held.get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{self._folder / file}: {name} cannot be read: {error}") from error
        if tensor.dtype not in _NUMBERS:
            raise CheckpointError(f"{self._folder / file}: {name} is {tensor.dtype}: want float32, bfloat16 or float16")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read."""
        held = self._opened(self.files[name])
        return tuple(held[name].shape if isinstance(held, dict) else held.get_slice(name).get_shape())

    def _find(self) -> dict[str, str]:
        for index in _INDEX_FILES:
            if (self._folder / index).is_file():
                return self._of_index(index)
        for file in _SINGLE_FILES:
            if (self._folder / file).is_file():
                held = self._opened(file)
                return dict.fromkeys(held.keys(), file)
        raise CheckpointError(f"{self._folder}: has no weights, neither {' nor '.join(_SINGLE_FILES)}, nor an index")

    def _of_index(self, index: str) -> dict[str, str]:
        content = read_json_object(self._folder / index, CheckpointError)
        files = content.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{self._folder / index}: has no weight_map of names to files")
        for file in set(files.values()):
            if Path(file).name != file:
                raise CheckpointError(f"{self._folder / index}: {file!r} is no file of this folder")
        held = {file: set(self._opened(file).keys()) for file in set(files.values())}
        for name, file in files.items():
            if name not in held[file]:
                raise CheckpointError(f"{self._folder / file}: holds no {name}, as {index} says")
        return files

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = self._unpickled(path) if path.suffix == ".bin" else self._mapped(path)
            except (OSError, SafetensorError, RuntimeError, EOFError) as error:
                told = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
                raise CheckpointError(f"{path} cannot be read: {told}") from error
        return self._open[file]

    def _mapped(self, path: Path) -> Any:
        return self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))

    @staticmethod
    def _unpickled(path: Path) -> dict[str, Tensor]:
        # Files of before torch 1.6 cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path}: holds more than tensors, which would be run to be read; nothing was run. Give a folder with "
                "safetensors"
            ) from error
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise CheckpointError(f"{path}: is no dict of tensors")
        return held


def import_folder(config: ImportConfig) -> Imported:
    """Imports a model.

    Raises:
        ConfigError: config.json is not there, or describes what megads does not compute; or the output is taken.
        DataError: the tokenizer is damaged or has more tokens than the model.
        CheckpointError: weights are missing, damaged, or not those of the config; or the output cannot be written.
    """
    config.check()
    folder, output = Path(config.input), Path(config.output)
    require_free(output, config.overwrite, _MADE_BY)
    if not folder.is_dir():
        raise ConfigError(f"input = {folder}: there is no such folder")
    content = read_json_object(folder / CONFIG_FILE, ConfigError)
    architecture = architecture_of(content)
    model = architecture.model_of(content)
    tokenizer = _tokenizer(folder, content, model)
    with TensorFiles(folder) as files, new_folder(output) as partial:
        names = _matched(files, architecture, model, folder)
        record = RunRecord(
            state={"step": 0, "samples": 0, "tokens": 0},
            optimizer_steps=0,
            config_digest="",
            model=json.loads(json.dumps(dataclasses.asdict(model))),
            layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1},
            tokenizer=tokenizer,
        )
        save_parts(partial, _parts(files, names, architecture, model), record)
        shutil.copyfile(folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)
        template = template_beside(folder / TOKENIZER_FILE)
        if template is not None:
            template_path(partial / TOKENIZER_FILE).write_text(template, encoding="utf-8")
        preset = Path("model") / f"{config.name}.yaml"
        _write_preset(partial / preset, model, folder)
        write_origin(partial, _MADE_BY)
    return Imported(output, model, architecture.class_name, output / preset)


def read_json_object(path: Path, kind: type[ConfigError] | type[CheckpointError]) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
        path: of the file.
        kind: of the error that is raised where it is missing, or holds something else.
    """
    try:
        content = parse_json(read_regular(path))
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise kind(f"{path}: holds no JSON object")
    return content


def _matched(files: TensorFiles, architecture: Architecture, model: ModelConfig, folder: Path) -> dict[str, str]:
    """The name in the files of every tensor that is wanted.

    Files of a model without its head leave out the first part of each name.

    Raises:
        CheckpointError: one is missing, has another shape, or is left over.
    """
    wanted = {
        name: shape for link in links(model, architecture.names) for name, shape in tensor_shapes(model, link).items()
    }
    found = {}
    for name in wanted:
        short = name if name.startswith(architecture.names.head) else name.partition(".")[2]
        known = name if name in files.files else short if short in files.files else None
        if known is not None:
            found[name] = known
    missing = sorted(wanted.keys() - found)
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing)} missing, which {architecture.class_name} has by config.json")
    for name, known in found.items():
        if (shape := files.shape(known)) != wanted[name]:
            raise CheckpointError(
                f"{folder}: {known} has shape {list(shape)}, by config.json it has {list(wanted[name])}"
            )
    left = files.files.keys() - set(found.values())
    extra = sorted(name for name in left if not name.endswith(_BUFFERS))
    head = f"{architecture.names.head}.weight"
    if model.tie_embeddings and head in extra:
        extra.remove(head)
        word = found[f"{architecture.names.outer['embedding.word']}.weight"]
        if not torch.equal(files[head], files[word]):
            raise CheckpointError(
                f"{folder}: {head} differs from {word}, but config.json says tie_word_embeddings: it is wrong"
            )
    if extra:
        raise CheckpointError(f"{folder}: {_some(extra)} left over: {architecture.class_name} has none by config.json")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more are" if len(names) > _NAMED else " is" if len(names) == 1 else " are"
    return f"{', '.join(names[:_NAMED])}{more}"


def _parts(
    files: TensorFiles, names: Mapping[str, str], architecture: Architecture, model: ModelConfig
) -> Iterator[list[Shard]]:
    """The parameters of each stage, fp32."""
    shapes = parameter_shapes(model)
    for stage in links_by_stage(model, architecture.names):
        shards = []
        for link in stage:
            converted = link.to_ours([files[names[name]] for name in link.theirs])
            for name, tensor in zip(link.ours, converted, strict=True):
                assert tuple(tensor.shape) == shapes[name], name
                shards.append(Shard(f"weight/{name}", shapes[name], (0,) * tensor.dim(), tensor.float()))
        yield shards


def _tokenizer(folder: Path, content: Mapping[str, Any], model: ModelConfig) -> TokenizerRecord:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(
            f"{path} is missing: megads reads tokenizers in that format only; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
        )
    tokenizer = load_tokenizer(path)
    rows = embedding_rows(tokenizer)
    if rows > model.vocabulary:
        raise DataError(f"{path}: has {rows:,} tokens, by config.json the model has {model.vocabulary:,}")
    end = content.get("eos_token_id")
    # Llama 3 ends turns, too: the first is the end of a document.
    end = end[0] if isinstance(end, list) and end else end
    if end is not None and (not isinstance(end, int) or tokenizer.id_to_token(end) is None):
        raise DataError(f"{folder / CONFIG_FILE}: eos_token_id = {end}: the tokenizer has no such token")
    return TokenizerRecord(tokenizer_sha256(path), rows, end, str(TextSpecialTokens.ignore))


def _write_preset(path: Path, model: ModelConfig, folder: Path) -> None:
    """The model's config as an option of the group `model`."""
    values, defaults = dataclasses.asdict(model), dataclasses.asdict(ModelConfig())
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    content = {"model": changed, "train": {"seq_len": min(model.max_seq_len, _LONGEST_SAMPLE)}}
    path.parent.mkdir()
    told = f"# Imported from {folder.resolve().name}: {model.num_layers} layers, width {model.hidden_size}.\n"
    text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
    path.write_text(f"# @package _global_\n{told}{text}", encoding="utf-8")
