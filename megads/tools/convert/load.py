"""Imports a checkpoint of another trainer into a run of megads.

Tensors are read, converted and written one after the other, the experts of a layer one by one. No code of the folder is
executed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import yaml
from torch import Tensor

from megads.api import (
    HUGGING_FACE_FOLDER,
    TOKENIZER_FILE,
    CheckpointError,
    ConfigError,
    DataError,
    ModelConfig,
    RunRecord,
    Shard,
    TextSpecialTokens,
    embedding_rows,
    load_tokenizer,
    parameter_count,
    router_state_shapes,
    save_parts,
    template_beside,
)
from megads.data.indexed.run_tokenizer import (
    GENERATION_FILE,
    MODEL_CONFIG_FILE,
    TOKENIZER_SETTINGS,
    TokenizerRecord,
    keep_hugging_face_files,
)
from megads.data.indexed.sidecar import TEMPLATE_FILE, tokenizer_sha256
from megads.model.gpt import initial_value
from megads.tools.convert import gpt_neox, hugging_face, megatron_core, megatron_deepspeed, nanotron, universal
from megads.tools.convert.deepspeed_files import UNIVERSAL_POINTERS, latest_step_folder
from megads.tools.convert.import_config import ImportConfig, ImportFormat
from megads.tools.convert.source import WEIGHT, Source, TrainingProgress, first_names_are, rows
from megads.tools.convert.weights import (
    WeightMapping,
    is_router_state,
    links,
    mappings_by_layer,
    shapes_of,
    tensor_shapes,
)
from megads.tools.output_folder import new_folder, require_replaceable, write_origin

_MADE_BY = "megads import"
_LONGEST_SAMPLE = 2048
"""Largest train.seq_len of the preset; longer sequences need memory that a first try may not have."""
FORMATS: dict[ImportFormat, ModuleType] = {
    ImportFormat.gpt_neox: gpt_neox,
    ImportFormat.megatron_deepspeed: megatron_deepspeed,
    ImportFormat.universal: universal,
    ImportFormat.megatron_core: megatron_core,
    ImportFormat.nanotron: nanotron,
    ImportFormat.hugging_face: hugging_face,
}
"""Modules with `is_this_format` and `open_source`, in the order in which formats are detected."""


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    Attributes:
        folder: folder of the new run; it is at step 0, or resumes another trainer's run.
        model: config of the model.
        source: the imported checkpoint.
        preset: file with the model's config.
        notes: remarks for the user.
    """

    folder: Path
    model: ModelConfig
    source: Source
    preset: Path
    notes: tuple[str, ...]

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer state was imported."""
        return len(self.source.tensors) > 1

    def __str__(self) -> str:
        state = f", with the optimizer's state after step {self.source.progress.step:,}" if self.has_moments else ""
        first = f"{self.folder}: {self.source.title}, {parameter_count(self.model):,} parameters{state}"
        return "\n".join((first, *self.notes))


def import_folder(config: ImportConfig) -> Imported:
    """Imports a model.

    Raises:
        ConfigError: the format is unknown, megads does not support the model, or the output exists and may not be
            replaced.
        DataError: the tokenizer is damaged or has more tokens than the model.
        CheckpointError: weights are missing, damaged or not those of the model, or the output cannot be written.
    """
    config.check()
    folder, output = Path(config.input), Path(config.output)
    require_replaceable(output, config.overwrite, _MADE_BY)
    if not folder.is_dir():
        raise ConfigError(
            f"input = {folder}: there is no such folder; give the folder of a model or of a trainer's checkpoint"
        )
    format_ = _detected(folder, config.format)
    with ExitStack() as stack:
        source = FORMATS[format_].open_source(folder, config, stack)
        tokenizer_path = _tokenizer_path(folder, config, format_)
        tokenizer = None if tokenizer_path is None else _tokenizer(source, tokenizer_path, folder, format_)
        _require_tensors(folder, source)
        source = _cut_vocabulary(source, config, tokenizer, format_)
        preset = Path("model") / f"{config.name}.yaml"
        with new_folder(output) as partial:
            parts = _Parts(source)
            save_parts(partial, parts, _record(source, tokenizer), parts.read)
            if tokenizer_path is not None:
                shutil.copyfile(tokenizer_path, partial / TOKENIZER_FILE)
                # A tokenizer given by the user comes with its own settings, which a run has in hugging_face/.
                for place in (tokenizer_path.parent, tokenizer_path.parent / HUGGING_FACE_FOLDER):
                    keep_hugging_face_files(place, partial, TOKENIZER_SETTINGS)
                template = template_beside(tokenizer_path)
                if template is not None and template_beside(partial / TOKENIZER_FILE) is None:
                    # That of a dataset, whose file begins with the dataset's name.
                    (partial / TEMPLATE_FILE).write_text(template, encoding="utf-8")
            for place in (folder, latest_step_folder(folder, UNIVERSAL_POINTERS)):
                keep_hugging_face_files(place, partial, (MODEL_CONFIG_FILE, GENERATION_FILE))
            _write_preset(partial / preset, source.model, folder)
            write_origin(partial, _MADE_BY)
    return Imported(output, source.model, source, output / preset, source.notes)


def _detected(folder: Path, wanted: ImportFormat) -> ImportFormat:
    """Returns the format of a folder.

    Raises:
        ConfigError: the folder has no files of the wanted format, or of any known format.
    """
    if wanted is not ImportFormat.auto:
        if wanted is not ImportFormat.hugging_face and not FORMATS[wanted].is_this_format(folder):
            raise ConfigError(f"input = {folder}: has no files of format={wanted} (docs/convert.md lists them)")
        return wanted
    for format_, module in FORMATS.items():
        if module.is_this_format(folder):
            return format_
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"input = {folder}: adapter_config.json: this is an adapter without its model; write both as one model "
            "with merge_and_unload() and save_pretrained() of peft, and import that"
        )
    raise ConfigError(
        f"input = {folder}: config.json cannot be read, it is missing, and there are no files of another trainer that "
        f"megads knows ({', '.join(FORMATS)}; docs/convert.md lists their files)"
    )


def _require_tensors(folder: Path, source: Source) -> None:
    """Raises CheckpointError if tensors are missing, have another shape, or are left over."""
    shapes = shapes_of(source.model, source.names)
    wanted = {
        name: shape for link in links(source.model, source.names) for name, shape in tensor_shapes(shapes, link).items()
    }
    for kind, tensors in source.tensors.items():
        of = "" if kind == WEIGHT else f" ({kind})"
        missing = sorted(wanted.keys() - tensors)
        if missing:
            raise CheckpointError(
                f"{folder}: {first_names_are(missing)} missing{of}, which {source.title} has by {source.told_by}"
            )
        for name, shape in wanted.items():
            if tensors[name].shape != shape:
                raise CheckpointError(
                    f"{tensors[name].where}: {name} has shape {list(tensors[name].shape)}{of}, by {source.told_by} it "
                    f"has {list(shape)}"
                )
        extra = sorted(tensors.keys() - wanted)
        if extra:
            raise CheckpointError(
                f"{folder}: {first_names_are(extra)} left over{of}: {source.title} has none by {source.told_by}"
            )


def _cut_vocabulary(
    source: Source, config: ImportConfig, tokenizer: TokenizerRecord | None, format_: ImportFormat
) -> Source:
    """Returns the source without the rows that pad its vocabulary.

    Raises:
        ConfigError: vocab_size is larger than the number of rows, or smaller than the number of tokens.
    """
    stored, tokens = source.model.vocabulary, 0 if tokenizer is None else tokenizer.vocab_size
    known = None if format_ is ImportFormat.hugging_face else tokens or source.unpadded
    wanted = config.vocab_size or known or stored
    if not tokens <= wanted <= stored:
        raise ConfigError(f"vocab_size = {wanted:,}: the model has {stored:,} rows, the tokenizer {tokens:,} tokens")
    if wanted == stored:
        return source
    names = {f"{source.names.outer['embedding.word']}.weight", f"{source.names.head}.weight"}
    cut = {
        kind: {name: rows(item, 0, wanted) if name in names else item for name, item in tensors.items()}
        for kind, tensors in source.tensors.items()
    }
    note = f"vocabulary: {wanted:,} of {stored:,} rows kept, the others are padding (vocab_size={stored} keeps them)"
    model = dataclasses.replace(source.model, vocab_size=wanted)
    return dataclasses.replace(source, model=model, tensors=cut, notes=(*source.notes, note))


def _record(source: Source, tokenizer: TokenizerRecord | None) -> RunRecord:
    progress = source.progress if len(source.tensors) > 1 else TrainingProgress()
    return RunRecord(
        state={"step": progress.step, "samples": progress.samples, "tokens": progress.tokens},
        optimizer_steps=progress.optimizer_steps,
        config_digest="",
        model=json.loads(json.dumps(dataclasses.asdict(source.model))),
        layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=tokenizer,
    )


class _Parts:
    """The tensors of a source as shards of a checkpoint in fp32, one file for each layer; read when they are written.

    Args:
        source: the imported checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._links = source, dict[tuple[str, tuple[int, ...]], WeightMapping]()

    def __iter__(self) -> Iterator[list[Shard]]:
        """Yields the shards of each layer, without values."""
        shapes = shapes_of(self._source.model, self._source.names)
        for layer in mappings_by_layer(self._source.model, self._source.names):
            part = []
            for kind in self._source.tensors:
                for link in layer:
                    if kind == WEIGHT or not is_router_state(link):
                        shards = link.shards(kind, shapes, "meta")
                        self._links |= {(shard.key, tuple(shard.offset)): link for shard in shards}
                        part += shards
            yield part
        missing = {name: shape for name, shape in router_state_shapes(self._source.model).items() if name not in shapes}
        if missing:
            yield [Shard(f"{WEIGHT}/{n}", s, (0,) * len(s), torch.empty(s, device="meta")) for n, s in missing.items()]

    def read(self, shard: Shard) -> Iterator[Tensor]:
        """Yields the values of a shard."""
        kind, _, name = shard.key.partition("/")
        link = self._links.get((shard.key, tuple(shard.offset)))
        if link is None:  # state of a router that other trainers do not store: as at the start of a training
            yield initial_value(self._source.model, seed=0)(name, tuple(shard.global_shape))
            return
        tensors = self._source.tensors[kind]
        converted = link.to_megads([tensors[name].read() for name in link.theirs])
        tensor = converted[link.ours.index(name)]
        assert tensor.shape == shard.tensor.shape, name
        yield tensor.float()


def _tokenizer_path(folder: Path, config: ImportConfig, format_: ImportFormat) -> Path | None:
    """Returns the tokenizer's file, or None if there is none.

    Raises:
        DataError: a Hugging Face model has no tokenizer file.
    """
    if config.tokenizer is not None:
        return Path(config.tokenizer)
    path = folder / TOKENIZER_FILE
    for place in (path, latest_step_folder(folder, UNIVERSAL_POINTERS) / TOKENIZER_FILE):
        if place.is_file():
            return place
    if format_ is not ImportFormat.hugging_face:
        return None
    raise DataError(
        f"{path} is missing: megads reads tokenizers in that format only; "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
    )


def _tokenizer(source: Source, path: Path, folder: Path, format_: ImportFormat) -> TokenizerRecord:
    tokenizer = load_tokenizer(path)
    count = embedding_rows(tokenizer)
    if count > source.model.vocabulary:
        raise DataError(f"{path}: has {count:,} tokens, by {source.told_by} the model has {source.model.vocabulary:,}")
    end = source.end_of_document_id
    if end is not None and (not isinstance(end, int) or tokenizer.id_to_token(end) is None):
        raise DataError(f"{folder / source.told_by}: eos_token_id = {end}: the tokenizer has no such token")
    # Other trainers tokenize documents without the post-processor.
    adds = format_ is ImportFormat.hugging_face
    return TokenizerRecord(tokenizer_sha256(path), count, end, str(TextSpecialTokens.ignore), adds_special_tokens=adds)


def _write_preset(path: Path, model: ModelConfig, folder: Path) -> None:
    """Writes the model's config as an option of the config group `model`."""
    values, defaults = dataclasses.asdict(model), dataclasses.asdict(ModelConfig())
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    content = {"model": changed, "train": {"seq_len": min(model.max_seq_len, _LONGEST_SAMPLE)}}
    path.parent.mkdir()
    told = f"# Imported from {folder.resolve().name}: {model.num_layers} layers, width {model.hidden_size}.\n"
    text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
    path.write_text(f"# @package _global_\n{told}{text}", encoding="utf-8")
