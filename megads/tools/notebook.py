"""Reads a run in a notebook: its model, config, metrics and data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    GPT,
    METRICS_FILE,
    BatchInfo,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    FoundTokenizer,
    GenerationSpeed,
    RootConfig,
    Sampling,
    TextGenerator,
    TrainSource,
    ValidationSource,
    WeightPrecision,
    choose_device,
    choose_dtype,
    config_of_start,
    import_plugins,
    load_frozen,
    load_unsharded,
    open_checkpoint,
    open_run_data,
    read_json_lines,
    read_record,
)
from megads.tools.generate import checkpoint_tokenizer, run_path


class LoadedModel:
    """The unsharded model of a checkpoint, in evaluation mode.

    Attributes:
        model: the module; returns logits for tokens [b, s] and a BatchInfo.
        folder: folder of the checkpoint.
        step: number of training steps.
    """

    def __init__(self, model: GPT, handle: CheckpointHandle) -> None:
        self.model, self.folder, self.step = model, handle.folder, handle.state["step"]
        self._handle = handle

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @cached_property
    def config(self) -> RootConfig:
        """The config of the start that wrote the checkpoint.

        Raises:
            CheckpointError: the run does not have that config.
        """
        found = config_of_start(self._run_dir, self._handle.manifest.run.config_digest)
        if found is None:
            raise CheckpointError(
                f"{self._run_dir} does not have the config with which {self.folder.name} was written; "
                f"its model is {self.model.config}"
            )
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The Hugging Face tokenizer that the run was trained with."""
        return self._found.tokenizer

    @torch.no_grad()
    def logits(self, ids_bs: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Returns the next-token logits at each position.

        Args:
            ids_bs: token ids [b, s].

        Returns:
            Logits [b, s, vocabulary] in the model's dtype.

        Raises:
            ConfigError: the ids do not have shape [b, s], or are outside the vocabulary.
        """
        tokens_bs = torch.as_tensor(ids_bs, dtype=torch.int64, device=self.device)
        vocabulary = self.model.config.vocabulary
        if tokens_bs.dim() != 2 or not tokens_bs.numel():
            raise ConfigError(f"ids_bs has shape {list(tokens_bs.shape)}: want [batch, sequence], not empty")
        if int(tokens_bs.min()) < 0 or int(tokens_bs.max()) >= vocabulary:
            raise ConfigError(f"ids_bs ranges from {tokens_bs.min()} to {tokens_bs.max()}: want 0 to {vocabulary - 1}")
        logits_bsv: Tensor = self.model(tokens_bs, BatchInfo(torch.arange(len(tokens_bs), device=self.device)))
        return logits_bsv

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        seed: int = 1234,
        end_of_document: str = "auto",
    ) -> str:
        """Returns the completion of a prompt; the arguments are the keys of `megads generate`.

        Raises:
            ConfigError: the prompt does not fit the model.
        """
        sampling = Sampling(temperature, top_p, top_k, seed)
        # The generator adds KV caches to its model, so it gets a copy that shares the weights.
        shared = {id(weight): weight for weight in self.model.parameters()}
        model = copy.deepcopy(self.model, dict(shared))
        generator = TextGenerator(model, self._found, sampling, max_new_tokens, end_of_document)
        (completion,) = generator.complete_all([generator.prompt(prompt)], 1, GenerationSpeed())
        return completion.text

    @property
    def _run_dir(self) -> Path:
        return self.folder.parent.parent

    @cached_property
    def _found(self) -> FoundTokenizer:
        return checkpoint_tokenizer(self._handle)


def load_model(
    run: str | Path, *, dtype: str | torch.dtype = "auto", device: str = "auto", plugins: Sequence[str] = ()
) -> LoadedModel:
    """Loads the unsharded model of a run or checkpoint, regardless of its layout.

    Args:
        run: folder of a run or its name in runs/, whose newest usable checkpoint is loaded; or folder of a checkpoint.
        dtype: dtype of weights and activations: bf16, fp32, a torch dtype, or auto (bf16 on a GPU, fp32 on a CPU).
        device: auto (a GPU if there is one), cpu, cuda or cuda:<number>.
        plugins: modules to import, for a model whose block comes from a plugin. A checkpoint imports nothing itself.

    Raises:
        CheckpointError: there is no usable checkpoint.
        ConfigError: the device or dtype does not exist, or the block's plugin is not imported.
    """
    import_plugins(plugins)
    where = choose_device(device)
    if isinstance(dtype, str):
        if dtype not in list(WeightPrecision):
            raise ConfigError(f"dtype = {dtype}: want {', '.join(WeightPrecision)}, or a torch dtype")
        dtype = choose_dtype(WeightPrecision(dtype), where)
    handle = open_checkpoint(run_path(str(run)))
    return LoadedModel(load_unsharded(handle, where, dtype), handle)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl: one per step with the loss, one per validation with valid/<name>/loss."""
    return list(read_json_lines(run_path(str(run)) / METRICS_FILE))


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's events.jsonl: starts, stops, checkpoints and faults with their causes."""
    return list(read_json_lines(run_path(str(run)) / EVENTS_FILE))


def read_config(run: str | Path) -> RootConfig:
    """Returns the config of a run's last start. Keys that its version lacks take their defaults; imports no plugins.

    Raises:
        ConfigError: the config is missing, or does not fit this version.
    """
    return load_frozen(run_path(str(run)) / CONFIG_FILE, complete=False)


class RunData(NamedTuple):
    """Data of a run.

    Attributes:
        train: training samples, an endless sequence; `megads why` prints those of a step.
        valid: validation windows by name of the validation set.
    """

    train: TrainSource
    valid: Mapping[str, ValidationSource]


def read_data(run: str | Path) -> RunData:
    """Opens the data of a run; paths are relative to the folder where the run was started.

    Raises:
        DataError: the data is missing, damaged, or not the data that the run was trained on.
    """
    folder = run_path(str(run))
    return RunData(*open_run_data(read_config(folder), read_record(folder)))
