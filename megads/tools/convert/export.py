"""Exports a checkpoint to a folder in the format of `transformers`.

The weights are read, converted and written one after the other: one parameter, one expert or part of the word embedding
is in memory at a time, regardless of the checkpoint's layout. The folder is written atomically.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

import megads
from megads.api import (
    AVERAGE,
    EMBEDDING,
    HEAD,
    CheckpointHandle,
    ConfigError,
    FoundTokenizer,
    ModelConfig,
    Precision,
    Shard,
    config_at,
    config_of_start,
    model_config_of,
    open_checkpoint,
    parameter_count,
    read_into,
)
from megads.checkpoint.rank_file import TensorLayout, write_tensor_file
from megads.data.indexed.run_tokenizer import GENERATION_FILE, MODEL_CONFIG_FILE, hugging_face_settings
from megads.tools.convert.architecture import Architecture
from megads.tools.convert.architectures import choose_architecture
from megads.tools.convert.export_config import ExportConfig, ExportPrecision
from megads.tools.convert.model_folder import ModelFolder, write_json
from megads.tools.convert.weights import (
    WeightMapping,
    is_router_state,
    mappings_by_layer,
    missing_biases,
    same,
    shapes_of,
    tensor_shapes,
)
from megads.tools.generate import checkpoint_tokenizer, run_path
from megads.tools.output_folder import new_folder, require_free_space, require_replaceable, write_origin

CONFIG_FILE, INDEX_FILE, SINGLE_FILE = MODEL_CONFIG_FILE, "model.safetensors.index.json", "model.safetensors"
_MADE_BY = "megads export"
_BLOCK_ELEMENTS = 1 << 24
"""Elements of the word embedding that are in memory at a time: 64 MiB of fp32."""
_DTYPES = {ExportPrecision.bf16: torch.bfloat16, ExportPrecision.fp32: torch.float32}
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Piece:
    """Tensors of one layer, or of one expert of it, all in one file.

    Attributes:
        links: links of the parameters.
        zeros: shapes, by name, of biases that the architecture has and the model lacks; written as zeros.
        layouts: name, dtype and shape of the tensors in the file.
    """

    links: tuple[WeightMapping, ...]
    zeros: Mapping[str, tuple[int, ...]]
    layouts: tuple[TensorLayout, ...]

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: output folder.
        class_name: class of the model in transformers.
        dtype: dtype of the weights.
        files: names of the weights files.
        nbytes: bytes of all weights.
    """

    folder: Path
    class_name: str
    dtype: str
    files: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e9:,.2f} GB" if self.nbytes >= 1e9 else f"{self.nbytes / 1e6:,.1f} MB"
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{self.folder}: {self.class_name}, {self.dtype}, {size} in {files}"


def export_checkpoint(config: ExportConfig) -> Exported:
    """Exports a checkpoint.

    Raises:
        ConfigError: no published architecture expresses the model, or the folder exists and may not be replaced.
        CheckpointError: the checkpoint is not usable, or the folder cannot be written.
        DataError: the tokenizer is missing or not the one of the training.
    """
    config.check()
    output = Path(config.output)
    require_replaceable(output, config.overwrite, _MADE_BY)
    handle = open_checkpoint(run_path(config.run))
    model = model_config_of(handle)
    kept = hugging_face_settings(handle.folder.parent.parent, MODEL_CONFIG_FILE)
    architecture = choose_architecture(model, config.format, kept.get("model_type"))
    tokenizer = checkpoint_tokenizer(handle, config.tokenizer)
    if tokenizer.vocab_size > model.vocabulary:
        raise ConfigError(
            f"{tokenizer.path} has {tokenizer.vocab_size:,} tokens, the model {model.vocabulary:,}: set "
            "tokenizer=<file> to the tokenizer that the run was trained with"
        )
    kind = _kind(config, handle)
    dtype = _DTYPES[_precision(config.precision, handle)]
    files = plan_files(model, architecture, dtype, config.shard_mib << 20)
    shapes = shapes_of(model, architecture.names_of(model))
    nbytes = sum(piece.nbytes for pieces in files.values() for piece in pieces)
    require_free_space(output, nbytes)
    with new_folder(output) as partial:
        for name, pieces in files.items():
            layouts = [layout for piece in pieces for layout in piece.layouts]
            tensors = _tensors(handle, model, shapes, pieces, dtype, kind)
            write_tensor_file(partial / name, layouts, tensors, {"format": "pt"}, wait=False)
            if len(files) > 1:
                print(f"{name}: {sum(piece.nbytes for piece in pieces) / 1e6:,.0f} MB", flush=True)
        write_settings(partial, architecture, model, tokenizer, handle.folder.parent.parent, dtype)
        write_origin(partial, _MADE_BY)
        if len(files) > 1:
            names = {layout.name: name for name, pieces in files.items() for p in pieces for layout in p.layouts}
            write_json(partial / INDEX_FILE, {"metadata": {"total_size": nbytes}, "weight_map": names})
        (partial / "README.md").write_text(
            _card(handle, model, architecture, _DTYPE_NAMES[dtype], kind), encoding="utf-8"
        )
    return Exported(output, architecture.class_name, _DTYPE_NAMES[dtype], tuple(files), nbytes)


def plan_files(
    model: ModelConfig, architecture: Architecture, dtype: torch.dtype, most_bytes: int
) -> dict[str, list[Piece]]:
    """Assigns layers to files by size.

    Args:
        model: the model to export.
        architecture: architecture that expresses it.
        dtype: dtype of the tensors.
        most_bytes: largest size of a file; a larger layer gets a separate file.

    Returns:
        Pieces of each file, by file name.
    """
    groups, size = list[list[Piece]]([[]]), 0
    for piece in _pieces(model, architecture, dtype):
        if groups[-1] and size + piece.nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _pieces(model: ModelConfig, architecture: Architecture, dtype: torch.dtype) -> Iterator[Piece]:
    """Yields a piece for each layer, and one for each expert; the last one also has the biases that the model lacks."""
    names = architecture.names_of(model)
    zeros, all_shapes = missing_biases(model, architecture.with_all_biases(model), names), shapes_of(model, names)
    groups: list[list[WeightMapping]] = []
    for layer in mappings_by_layer(model, names):
        groups += [[link for link in layer if link.rows is None], *([link] for link in layer if link.rows is not None)]
    for number, group in enumerate(groups, 1):
        own = zeros if number == len(groups) else {}
        shapes = {name: shape for link in group for name, shape in tensor_shapes(all_shapes, link).items()} | own
        # As in DeepSeek-V3, the bias that selects experts stays in fp32.
        wide = {name for link in group if is_router_state(link) for name in link.theirs}
        layouts = [TensorLayout(n, torch.float32 if n in wide else dtype, shape) for n, shape in shapes.items()]
        yield Piece(tuple(group), own, tuple(layouts))


def _tensors(
    handle: CheckpointHandle,
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    kind: str,
) -> Iterator[Tensor | Iterator[Tensor]]:
    """Yields the tensors of a file in the order of its layouts; one is in memory at a time, embeddings in blocks."""
    for piece in pieces:
        for link in piece.links:
            if link.to_hugging_face is same and link.layer in (EMBEDDING, HEAD):
                for name in link.ours:
                    yield _row_blocks(handle, f"{kind}/{name}", shapes[name], dtype)
                continue
            weights = read_parameters(handle, link, shapes, kind)
            folded = [_folded(model, name, weight) for name, weight in zip(link.ours, weights, strict=True)]
            for tensor in link.to_hugging_face(folded):
                yield tensor if is_router_state(link) else tensor.to(dtype)
        for shape in piece.zeros.values():
            yield torch.zeros(shape, dtype=dtype)


def _folded(model: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """Folds the multipliers of model.mup, which no architecture has, into a parameter; in place.

    The logit multiplier goes to the final norm's gain and bias, the query scale to the query norm or, without QK norm,
    to the query projection.
    """
    if model.mup.base_width is None:
        return weight
    # Architectures have keys for the model's own multipliers.
    model = replace(model, logit_scale=1.0, attention_multiplier=None)
    module, _, part = name.rpartition(".")
    norms = {"final_norm": model.logit_multiplier, "query_norm": model.query_scale if model.qk_norm else 1.0}
    factor = norms.get(module.rpartition(".")[2], 1.0)
    # A zero-centered weight is the gain minus 1.
    weight *= factor
    if model.norm_zero_centered and part == "weight":
        weight += factor - 1.0
    if not model.qk_norm and module.endswith("attention.qkv"):
        heads = weight.view(-1, model.queries_per_kv + 2, model.head_dim, *weight.shape[1:])
        heads[:, : model.queries_per_kv] *= model.query_scale
    return weight


def _row_blocks(handle: CheckpointHandle, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields a parameter in blocks of rows; the word embedding may be larger than many transformer blocks."""
    rows = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
    for start in range(0, shape[0], rows):
        block = torch.empty(min(rows, shape[0] - start), *shape[1:])
        read_into(handle, [Shard(key, shape, (start, *(0 for _ in shape[1:])), block)])
        yield block.to(dtype)


def read_parameters(
    handle: CheckpointHandle, link: WeightMapping, shapes: Mapping[str, tuple[int, ...]], kind: str = "weight"
) -> list[Tensor]:
    """Reads the parameters of a link from a checkpoint in fp32, in the order of `link.ours`.

    Args:
        handle: the checkpoint.
        link: link of the parameters to read.
        shapes: shapes of all parameters by name.
        kind: "weight", "average", or a kind of optimizer state; a router's state only has "weight".

    Raises:
        CheckpointError: a parameter is missing.
    """
    shards = link.shards("weight" if is_router_state(link) else kind, shapes)
    read_into(handle, shards)
    return [shard.tensor for shard in shards]


def write_settings(
    folder: Path,
    architecture: Architecture,
    model: ModelConfig,
    tokenizer: FoundTokenizer,
    run_dir: Path,
    dtype: torch.dtype,
) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files; see `ModelFolder`."""
    found = ModelFolder(run_dir, tokenizer)
    found.write_tokenizer(folder, model.max_seq_len)
    # transformers 4 reads torch_dtype, transformers 5 dtype.
    dtypes = dict.fromkeys(("dtype", "torch_dtype"), _DTYPE_NAMES[dtype])
    content = {**architecture.config_json(model), **found.token_ids(), **dtypes, "use_cache": True}
    write_json(folder / CONFIG_FILE, content)
    write_json(folder / GENERATION_FILE, found.generation_config())


def _kind(config: ExportConfig, handle: CheckpointHandle) -> str:
    """Returns the kind of tensors to export: weights or their running average."""
    if not config.average:
        return "weight"
    if not any(key.startswith(f"{AVERAGE}/") for key in handle.manifest.tensors):
        raise ConfigError(
            f"average = true, but {handle.folder} holds no running average, which needs optim.ema_decay in training"
        )
    return AVERAGE


def _precision(wanted: ExportPrecision, handle: CheckpointHandle) -> ExportPrecision:
    if wanted is not ExportPrecision.auto:
        return wanted
    found = config_of_start(handle.folder.parent.parent, handle.manifest.run.config_digest)
    bf16 = found is not None and found.train.precision is Precision.bf16
    return ExportPrecision.bf16 if bf16 else ExportPrecision.fp32


def _card(handle: CheckpointHandle, model: ModelConfig, architecture: Architecture, dtype: str, kind: str) -> str:
    """Returns the model card, with facts from the run's records."""
    run = handle.manifest.run
    found = config_of_start(handle.folder.parent.parent, run.config_digest)
    rows = {
        "architecture": f"{architecture.class_name}, {model.num_layers} layers, width {model.hidden_size}, "
        f"{model.num_heads} heads, vocabulary {model.vocabulary:,}",
        "parameters": f"{parameter_count(model):,}",
        "weights": f"running average, {dtype}" if kind == AVERAGE else dtype,
        "run": handle.folder.parent.parent.resolve().name,
        "trained for": f"{run.state['step']:,} steps, {run.state['samples']:,} samples, {run.state['tokens']:,} tokens",
        "layout": ", ".join(f"{axis} {size}" for axis, size in run.layout.items()),
        "config": f"sha256 {run.config_digest}",
    }
    if found is not None:
        found = config_at(found, max(run.state["samples"] - 1, 0))
        batch = f"{found.train.global_batch_size:,} samples of {found.train.seq_len:,} tokens"
        rows |= {
            "precision": str(found.train.precision),
            "batch": batch,
            "optimizer": f"{found.optim.name}, learning rate {found.optim.lr:g}, {found.schedule.name}",
            "data": ", ".join(item.path for item in found.data.train),
            "seed": str(found.train.seed),
        }
    software = ", ".join(f"{name} {version}" for name, version in handle.manifest.software.items())
    rows |= {"trained with": software, "exported with": f"megads {megads.__version__}"}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    loads = (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megads\n---\n\n"
    return f"{front}# {rows['run']}\n\n| | |\n|---|---|\n{table}\n\n{loads}"
