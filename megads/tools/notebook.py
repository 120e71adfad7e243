"""A run as a notebook reads it: its model, its config, its numbers and its data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.read import CheckpointHandle, load_unsharded, open_checkpoint
from megads.config import RootConfig, open_run_data
from megads.data.indexed.recorded import read_record
from megads.data.indexed.sidecar import FoundTokenizer
from megads.data.sampling.runs import TrainSource, ValidationSource
from megads.errors import CheckpointError, ConfigError
from megads.evaluate.config import WeightPrecision
from megads.evaluate.generation import GenerationSpeed, Sampling, TextGenerator, choose_device, choose_dtype
from megads.frozen_config import config_of_start, load_frozen
from megads.model.gpt import GPT
from megads.runtime.metrics import read_json_lines
from megads.runtime.registry import import_plugins
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from megads.tools.generate import checkpoint_tokenizer, run_path


class LoadedModel:
    """The unsharded model of a checkpoint, in evaluation mode.

    Attributes:
        model: the module; called with tokens [b, s] and a BatchInfo it returns logits.
        folder: the checkpoint's.
        step: steps that it was trained for.
    """

    def __init__(self, model: GPT, handle: CheckpointHandle) -> None:
        self.model, self.folder, self.step = model, handle.folder, handle.state["step"]
        self._handle = handle

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @cached_property
    def config(self) -> RootConfig:
        """The config of the start that wrote the checkpoint.

        Raises:
            CheckpointError: it does not lie beside the checkpoint.
        """
        found = config_of_start(self._run_dir, self._handle.manifest.run.config_digest)
        if found is None:
            raise CheckpointError(
                f"{self._run_dir} does not hold the config with which {self.folder.name} was written; "
                f"its model is {self.model.config}"
            )
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with, of Hugging Face `tokenizers`."""
        return self._found.tokenizer

    @torch.no_grad()
    def logits(self, ids_bs: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Logits of the token after each one.

        Args:
            ids_bs: token ids [b, s].

        Returns:
            [b, s, vocabulary] in the model's dtype.

        Raises:
            ConfigError: ids are not [b, s], or beyond the vocabulary.
        """
        tokens_bs = torch.as_tensor(ids_bs, dtype=torch.int64, device=self.device)
        vocabulary = self.model.config.vocabulary
        if tokens_bs.dim() != 2 or not tokens_bs.numel():
            raise ConfigError(f"ids_bs has shape {list(tokens_bs.shape)}: want [batch, sequence], neither of them 0")
        if int(tokens_bs.min()) < 0 or int(tokens_bs.max()) >= vocabulary:
            raise ConfigError(f"ids_bs reaches from {tokens_bs.min()} to {tokens_bs.max()}: want 0 to {vocabulary - 1}")
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
        """The text that follows a prompt; the arguments are the keys of `megads generate`.

        Raises:
            ConfigError: the prompt does not fit the model.
        """
        sampling = Sampling(temperature, top_p, top_k, seed)
        # A generator puts caches into its model; the weights are shared.
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
    """Loads the whole model of a run, or of one checkpoint, whatever its layout was.

    Args:
        run: a run's folder or its name in runs/, of which the newest usable checkpoint is taken, or a checkpoint's.
        dtype: of weights and activations: bf16, fp32, a torch dtype, or auto: bf16 on a GPU, fp32 on a CPU.
        device: auto (a GPU where there is one), cpu, cuda or cuda:<number>.
        plugins: modules to import, for a model with a block of a plugin. A checkpoint imports nothing.

    Raises:
        CheckpointError: there is no usable checkpoint.
        ConfigError: there is no such device or dtype, or the block is of a plugin that is not imported.
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
    """The lines of a run's metrics.jsonl: one a step, with its loss, and one a validation, with valid/<name>/loss."""
    return list(read_json_lines(run_path(str(run)) / METRICS_FILE))


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's events.jsonl: starts, stops, checkpoints, faults, each with its cause."""
    return list(read_json_lines(run_path(str(run)) / EVENTS_FILE))


def read_config(run: str | Path) -> RootConfig:
    """The config of a run's last start; keys that its version did not have take their defaults, no plugin is imported.

    Raises:
        ConfigError: there is none, or it does not fit this version.
    """
    return load_frozen(run_path(str(run)) / CONFIG_FILE, complete=False)


class RunData(NamedTuple):
    """What a run reads.

    Attributes:
        train: its training samples, without an end; `megads why` shows those of a step.
        valid: its validation windows by the set's name.
    """

    train: TrainSource
    valid: Mapping[str, ValidationSource]


def read_data(run: str | Path) -> RunData:
    """Opens the data of a run; paths are relative to where the run was started.

    Raises:
        DataError: it is missing, damaged, or not what the run was trained on.
    """
    folder = run_path(str(run))
    return RunData(*open_run_data(read_config(folder), read_record(folder)))
