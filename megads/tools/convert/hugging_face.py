"""Reads models in Hugging Face's format: config.json, safetensors or pytorch_model.bin.

No code of the folder is executed: config.json is data, and tensors are read from safetensors or with torch's
weights-only unpickler.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.api import CheckpointError, ConfigError, parse_json, read_regular, reason_of
from megads.tools.convert.architecture import Content
from megads.tools.convert.architectures import architecture_of
from megads.tools.convert.export import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.pickles import load_tensors
from megads.tools.convert.source import WEIGHT, Source, SourceTensor, Tensors, require_float, separate_experts
from megads.tools.convert.weights import Names, links

_SINGLE_FILES = (SINGLE_FILE, "pytorch_model.bin")
_INDEX_FILES = (INDEX_FILE, "pytorch_model.bin.index.json")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Name suffixes of buffers in old files: masks and rotary frequencies."""


class TensorFiles:
    """Tensors of a folder, by name. A context manager that keeps the files open.

    Args:
        folder: folder with safetensors or pytorch_model.bin, as one file or as several with an index.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            raise CheckpointError(f"{self.folder / file}: {name} cannot be read: {error}") from error
        return require_float(tensor, f"{self.folder / file}: {name}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading it."""
        held = self._opened(self.files[name])
        return tuple(held[name].shape if isinstance(held, dict) else held.get_slice(name).get_shape())

    def _find(self) -> dict[str, str]:
        for index in _INDEX_FILES:
            if (self.folder / index).is_file():
                return self._of_index(index)
        for file in _SINGLE_FILES:
            if (self.folder / file).is_file():
                held = self._opened(file)
                return dict.fromkeys(held.keys(), file)
        raise CheckpointError(f"{self.folder}: has no weights, neither {' nor '.join(_SINGLE_FILES)}, nor an index")

    def _of_index(self, index: str) -> dict[str, str]:
        content = read_json_object(self.folder / index, CheckpointError)
        files = content.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{self.folder / index}: has no weight_map of names to files")
        for file in set(files.values()):
            if Path(file).name != file:
                raise CheckpointError(f"{self.folder / index}: {file!r} is not a file of this folder")
        held = {file: set(self._opened(file).keys()) for file in set(files.values())}
        for name, file in files.items():
            if name not in held[file]:
                raise CheckpointError(f"{self.folder / file}: holds no {name}, as {index} says")
        return files

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = load_tensors(path) if path.suffix == ".bin" else self._mapped(path)
            except (OSError, SafetensorError, RuntimeError, EOFError) as error:
                told = reason_of(error) if isinstance(error, OSError) else str(error).splitlines()[0]
                raise CheckpointError(f"{path} cannot be read: {told}") from error
        return self._open[file]

    def _mapped(self, path: Path) -> Any:
        return self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))


def is_this_format(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    return (folder / CONFIG_FILE).is_file()


def open_source(folder: Path, _config: ImportConfig, stack: ExitStack) -> Source:
    """Opens the model in a folder.

    Raises:
        ConfigError: config.json is missing, or describes a model that megads does not support.
        CheckpointError: weights are missing or damaged.
    """
    content = read_json_object(folder / CONFIG_FILE, ConfigError)
    architecture = architecture_of(content)
    if quantized := content.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"config.json: quantization_config has quant_method = {method!r}: megads reads weights in float32, "
            "bfloat16 or float16; import the model from which these were quantized"
        )
    model = architecture.model_of(content)
    files = stack.enter_context(TensorFiles(folder))
    names = architecture.names_of(model)
    wanted = [name for link in links(model, names) for name in link.theirs]
    stored = {
        name: SourceTensor(files.shape(name), partial(files.__getitem__, name), f"{folder}: {name}")
        for name in files.files
    }
    extra = _prediction_layers(content, names.prefix, model.num_layers)
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(extra)}
    notes = ("layers of multi-token prediction left out, which megads does not compute",) if kept != stored else ()
    found = _matched(folder, separate_experts(kept, names), names, wanted, model.tie_embeddings)
    end = content.get("eos_token_id")
    # Llama 3 also lists tokens that end a turn; the first one ends a document.
    end = end[0] if isinstance(end, list) and end else end
    return Source(
        architecture.class_name, CONFIG_FILE, model, names, {WEIGHT: found}, end_of_document_id=end, notes=notes
    )


def _prediction_layers(content: Content, prefix: str, num_layers: int) -> tuple[str, ...]:
    """Prefixes of the tensors of multi-token prediction (GLM-4.5), which files have as layers after the model's."""
    count = content.get("num_nextn_predict_layers")
    layers = range(num_layers, num_layers + count) if isinstance(count, int) else range(0)
    return tuple(f"{prefix.format(layer)}." for layer in layers)


def read_json_object(path: Path, kind: type[ConfigError] | type[CheckpointError]) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
        path: path of the file.
        kind: type of the error to raise if the file is missing or has other content.
    """
    try:
        content = parse_json(read_regular(path))
    except OSError as error:
        raise kind(f"{path} cannot be read: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise kind(f"{path}: holds no JSON object")
    return content


def _matched(folder: Path, stored: Tensors, names: Names, wanted: list[str], tied: bool) -> dict[str, SourceTensor]:
    """Returns the tensors by wanted name; other tensors keep their own names.

    Files of a model without its head omit the first component of each name.

    Raises:
        CheckpointError: the embeddings are tied, but the files have a head that differs from the embedding.
    """
    known: dict[str, str] = {}
    for name in wanted:
        short = name if name.startswith(names.head) else name.partition(".")[2]
        if name in stored or short in stored:
            known[name] = name if name in stored else short
    left = [name for name in stored.keys() - set(known.values()) if not name.endswith(_BUFFERS)]
    head, word = f"{names.head}.weight", f"{names.outer['embedding.word']}.weight"
    if tied and head in left and word in known:
        left.remove(head)
        if not torch.equal(stored[head].read(), stored[known[word]].read()):
            raise CheckpointError(
                f"{folder}: {head} differs from {known[word]}, but config.json says tie_word_embeddings: it is wrong"
            )
    return {name: stored[other] for name, other in (known | {name: name for name in left}).items()}
